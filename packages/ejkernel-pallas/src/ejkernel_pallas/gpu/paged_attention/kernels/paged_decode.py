"""Paged attention on Hopper: a consumer warpgroup with 64 rows of scores, and a producer warpgroup.

The rows are the query heads of one KV head, for as many tokens of a sequence as fit, so that a key is read once for all
of them. A step has a block of 128 keys, whose pages the producer copies one by one into a stage.

    producer    K0 V0 | K1 V1 | K2 V2 | K3 V3 ...                 ahead by the number of stages
    consumer            Q K0, softmax, P0 V0 | Q K1, softmax, P1 V1 ...

One consumer suffices: a multiprocessor takes longer to read a block of 128 keys and values of 128 than to multiply it.
"""

from typing import Any, NamedTuple

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from ejkernel.arithmetic import LN2
from ejkernel_pallas.gpu.hopper import arrays, wgmma
from ejkernel_pallas.gpu.hopper.arrays import broadcast_to_columns, store_tile
from ejkernel_pallas.gpu.hopper.lazy_rescaling import rescale_lazily
from ejkernel_pallas.gpu.hopper.row_ranges import zero_rows_outside
from ejkernel_pallas.gpu.hopper.sizes import I32, WGMMA_M
from ejkernel_pallas.gpu.latent_attention.kernels.call import WorkItem, for_each_item, program_and_head_tile
from ejkernel_pallas.gpu.latent_attention.spec import KEYS_PER_STEP, SWIZZLE_ATOM_ROWS
from ejkernel_pallas.gpu.paged_attention.kernels.call import Call
from ejkernel_pallas.gpu.paged_attention.kernels.producer import produce

MASKED_SCORE = -1e30
"""The maximum of no scores, and a masked score: finite, so that differences are not NaN."""


class ConsumerState(NamedTuple):
    """The state that the consumer carries from step to step.

    Attributes:
        unnormalised_output: [64, Dv] unnormalised output.
        row_max: [64] running maximum, in base 2.
        row_sum: [64] sums of the weights.
    """

    unnormalised_output: Any
    row_max: Any
    row_sum: Any


def paged_kernel(call: Call) -> None:
    """Runs one thread block of the kernel."""
    warpgroup = lax.axis_index("warpgroup")

    @pl.when(warpgroup == 0)
    def _consume() -> None:
        # The register limits of warpgroups stay equal: two warpgroups share 65536 registers, more than their threads
        # can use.
        for_each_item(call, lambda item, count: _consume_item(call, item, count), I32(0))

    pl.when(warpgroup == 1)(lambda: produce(call))


def _consume_item(call: Call, item: WorkItem, blocks_done: Any) -> Any:
    """Computes a program's steps of an item; returns the number of blocks that it has processed so far."""
    shared, spec = call.shared, call.spec
    plgpu.barrier_wait(shared.q_full)
    begin = ConsumerState(
        arrays.zero_tile((WGMMA_M, spec.value_dim)),
        arrays.fill_row_vector(WGMMA_M, MASKED_SCORE),
        arrays.fill_row_vector(WGMMA_M, 0.0),
    )
    position = call.operands["items"][item.query_row, 5]
    state = lax.fori_loop(
        0, item.num_steps, lambda n, state: _attend_block(call, item, position, n, blocks_done + n, state), begin
    )
    # The last scores have been awaited.
    plgpu.barrier_arrive(shared.q_free)
    # `row_sum` is not 0: for rows that attend to nothing, weights are exp2(MASKED_SCORE - MASKED_SCORE) = 1.
    # `forward.py` drops such rows by their lse.
    output = state.unnormalised_output * broadcast_to_columns(
        spec.value_scale / state.row_sum, state.unnormalised_output.shape
    )
    _write_output(call, item, output, state.row_max * LN2 + jnp.log(state.row_sum))
    return blocks_done + item.num_steps


def _attend_block(
    call: Call, item: WorkItem, first_token_position: Any, step: Any, blocks_done: Any, state: ConsumerState
) -> ConsumerState:
    """Adds a block of keys; `step` is the step of the item, `blocks_done` counts the program's earlier blocks."""
    shared, spec = call.shared, call.spec
    slot = lax.rem(blocks_done, I32(spec.stages))
    key = (item.first_step + step) * KEYS_PER_STEP
    plgpu.barrier_wait(shared.k_full.at[slot])
    # The product is not issued a step ahead: decoding reads 64 KB per step, which takes longer than its products
    # (docs/lab/hopper_paged_attention.md).
    scores = wgmma.wait_for_products(wgmma.issue_scores(shared.q, shared.k.at[slot]), max_in_flight=0)
    # Before the stage is freed: the producer then writes the bits of a later block.
    present = shared.valid_key_bits[slot]
    # The stage's keys are freed while its values are still needed: they have separate mbarriers.
    plgpu.barrier_arrive(shared.k_free.at[slot])
    scores = _mask_scores(call, item, scores, key, first_token_position, present)
    row_max = jnp.maximum(state.row_max, scores.max(axis=1))
    weights = jnp.exp2(scores - broadcast_to_columns(row_max, scores.shape))
    # A row without any key so far has weights of 1: its first key makes alpha exp2(MASKED_SCORE - m) = 0.
    alpha = jnp.exp2(state.row_max - row_max)
    row_sum = state.row_sum * alpha + weights.sum(axis=1)
    output = _rescale_output(call, state.unnormalised_output, alpha)
    first, end = item.first_key - key, item.key_end - key
    plgpu.barrier_wait(shared.v_full.at[slot])
    # Slots of keys that no row attends to may hold NaN, and a weight of zero times NaN is NaN.
    pl.when((end < KEYS_PER_STEP) | (first > 0))(lambda: _zero_rows_outside(shared.v.at[slot], first, end))
    # Keeps the conversion before the product, during which the registers of its operand must not be written.
    weights = lax.optimization_barrier(weights.astype(spec.dtype))
    output = _multiply_values(output, weights, shared.v.at[slot])
    plgpu.barrier_arrive(shared.v_free.at[slot])
    return ConsumerState(output, row_max, row_sum)


def _mask_scores(
    call: Call, item: WorkItem, scores: Any, first_key: Any, first_token_position: Any, valid_key_bits: Any
) -> Any:
    """Returns scores in base 2, `MASKED_SCORE` where a row does not attend.

    Args:
        call: The launch.
        item: The item whose keys these are.
        scores: [64, 128].
        first_key: The block's first key.
        first_token_position: Position of the tile's first token.
        valid_key_bits: One bit per eight keys, set if their page exists.
    """
    spec = call.spec
    column = plgpu.broadcasted_iota(I32, scores.shape, 1, layout=plgpu.Layout.WGMMA)
    # Limits of the whole tile: the first key of its first token, and the last key of its last. Limits of single tokens
    # follow below.
    is_attended = (column < item.key_end - first_key) & (column >= item.first_key - first_key)
    if spec.pages_per_table_row:
        group_bits = jnp.right_shift(valid_key_bits, lax.div(column, I32(SWIZZLE_ATOM_ROWS)))
        is_attended = is_attended & (jnp.bitwise_and(group_bits, 1) > 0)
    if spec.tokens_per_tile > 1 and (spec.left_window is not None or spec.right_window is not None):
        row = plgpu.broadcasted_iota(I32, scores.shape, 0, layout=plgpu.Layout.WGMMA)
        # The distance of a key from its row's token.
        distance = column - lax.div(row, I32(spec.rows_per_token)) + (first_key - first_token_position)
        if spec.right_window is not None:
            is_attended = is_attended & (distance <= spec.right_window)
        if spec.left_window is not None:
            is_attended = is_attended & (distance >= -spec.left_window)
    # Selected, instead of adding -inf: products with invalid slots may be NaN, and keys are not zeroed.
    return jnp.where(is_attended, scores * spec.softmax_scale_log2, MASKED_SCORE)


def _zero_rows_outside(tile: Any, first_row: Any, end_row: Any) -> None:
    """Writes zeros to the rows of a tile before `first_row` and from `end_row` on."""
    zero_rows_outside(tile, first_row, end_row)
    plgpu.commit_smem()


def _rescale_output(call: Call, output: Any, alpha: Any) -> Any:
    return (
        rescale_lazily(output, alpha)
        if call.spec.rescales_lazily
        else output * broadcast_to_columns(alpha, output.shape)
    )


def _multiply_values(output: Any, weights: Any, values: Any) -> Any:
    """Returns the output plus weights times values."""
    ref = plgpu.WGMMAAccumulatorRef.init(output)
    return pl.run_state(lambda ref: plgpu.wgmma(ref, weights, values))(ref)


def _write_output(call: Call, item: WorkItem, output: Any, lse: Any) -> None:
    """Writes the rows of an item, or of a partial result."""
    output_ref, sums, parts, partial_lse = call.outputs
    _, head = program_and_head_tile(call)
    number = item.query_row * call.spec.tiles_per_item + head

    @pl.when(item.has_all_steps)
    def _write_whole_item() -> None:
        store_tile(output_ref.at[pl.ds(number * WGMMA_M, WGMMA_M), :], output.astype(call.spec.dtype))
        sums[number] = lse

    @pl.when(~item.has_all_steps)
    def _write_partial_result() -> None:
        # Divided by its own denominator, which its lse includes: the weight when partial results are merged.
        parts[item.partial_result_slot] = output
        partial_lse[item.partial_result_slot] = lse
