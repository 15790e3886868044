"""Paged attention on Hopper: a consumer warpgroup with 64 rows of scores, and a producer warpgroup.

The rows are the query heads of one KV head, for as many tokens of a sequence as fit, so that a key is read once for all
of them. A step has a block of 128 keys, whose pages the producer copies one by one into a stage.

    producer    K0 V0 | K1 V1 | K2 V2 | K3 V3 ...                 ahead by the number of stages
    consumer            Q K0, softmax, P0 V0 | Q K1, softmax, P1 V1 ...

One consumer suffices: a multiprocessor takes longer to read a block of 128 keys and values of 128 than to multiply it.
"""

import functools
from typing import Any, NamedTuple

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from ejkernel.arithmetic import LN2, cdiv
from ejkernel_pallas.gpu.hopper import arrays, fixed_splits, wgmma
from ejkernel_pallas.gpu.hopper.arrays import broadcast_to_columns, store_tile
from ejkernel_pallas.gpu.hopper.arrivals import add_arrivals
from ejkernel_pallas.gpu.hopper.fixed_splits import RowTotals
from ejkernel_pallas.gpu.hopper.lazy_rescaling import rescale_lazily
from ejkernel_pallas.gpu.hopper.row_ranges import zero_rows_outside
from ejkernel_pallas.gpu.hopper.sizes import I32, WGMMA_M
from ejkernel_pallas.gpu.latent_attention.kernels.call import WorkItem, for_each_item, program_and_head_tile
from ejkernel_pallas.gpu.latent_attention.spec import KEYS_PER_STEP, SWIZZLE_ATOM_ROWS
from ejkernel_pallas.gpu.paged_attention.kernels.call import Call
from ejkernel_pallas.gpu.paged_attention.kernels.fixed_split_combine import (
    MAX_VECTORS_PER_BLOCK,
    fold_item_rows,
    rows_per_item,
    rows_per_vector,
)
from ejkernel_pallas.gpu.paged_attention.kernels.producer import item_rows, produce, split_steps
from ejkernel_pallas.gpu.paged_attention.spec import PagedSpec
from ejkernel_pallas.gpu.tiled_attention.kernels.online_softmax import add_key_block, reduce_row_sum
from ejkernel_pallas.gpu.tiled_attention.spec import INITIAL_ROW_MAX

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
        consume = _consume_item_in_splits if call.spec.split_keys else _consume_item
        for_each_item(
            call, lambda item, count: consume(call, item, count), I32(0), keys_per_step=call.spec.keys_per_unit
        )

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


def _consume_item_in_splits(call: Call, item: WorkItem, blocks_done: Any) -> Any:
    """Computes a program's splits of an item, each from an empty softmax; returns the blocks processed so far.

    Splits of an item that is cut are stored one by one, and folded by `fixed_split_combine`. Those of others are folded
    here, in the same order and with the same instructions, as in prefill (`split_totals.py`).
    """
    shared, spec = call.shared, call.spec
    plgpu.barrier_wait(shared.q_full)
    position = call.operands["items"][item.query_row, 5]
    # In shared memory: with a second accumulator in registers, the loop spills.
    pl.when(item.has_all_steps)(lambda: fixed_splits.zero_thread_tile(shared.split_total))
    last_step = split_steps(spec, item, item.first_step, item.num_steps)[1] - 1
    empty = ConsumerState(
        arrays.zero_tile((WGMMA_M, spec.value_dim)),
        arrays.fill_row_vector(WGMMA_M, INITIAL_ROW_MAX),
        arrays.fill_row_vector(WGMMA_M, 0.0),
    )

    first_split = spec.splits.index(item.first_step)
    num_splits = spec.splits.index(item.first_step + item.num_steps - 1) - first_split + 1

    def add_split(number: Any, carry: Any) -> Any:
        done, *rows = carry
        unit, next_unit = (spec.splits.first_unit(first_split + number + n) for n in (0, 1))
        first, end = split_steps(spec, item, unit, next_unit - unit)
        split = item._replace(first_step=first)
        state = lax.fori_loop(
            0, end - first, lambda n, state: _attend_block(call, split, position, n, done + n, state, last_step), empty
        )
        row_sum = reduce_row_sum(state.row_sum)
        _store_split(call, item, number, state._replace(row_sum=row_sum))
        totals, weights = fixed_splits.fold_rows(RowTotals(*rows), state.row_max, row_sum)
        _fold_or_write(call, item, number == num_splits - 1, state.unnormalised_output, totals, weights)
        return done + end - first, *totals

    blocks_done, *_ = lax.fori_loop(0, num_splits, add_split, (blocks_done, empty.row_max, empty.row_sum))
    if spec.counts_arrivals:
        pl.when(~item.has_all_steps)(lambda: _fold_if_last(call, item))
    return blocks_done


def _fold_if_last(call: Call, item: WorkItem) -> None:
    """Folds all splits of an item if no other program has yet to store some of them."""
    spec, (output_ref, sums, parts, part_max, part_sum) = call.spec, call.outputs
    _, head = program_and_head_tile(call)
    counter = call.arrivals.at[item.query_row * spec.tiles_per_item + head]
    before = add_arrivals(counter, item.num_steps, call.shared.arrivals_before)

    @pl.when(before + item.num_steps == call.operands["items"][item.query_row, 3])
    def _fold() -> None:
        operands = {"parts": parts, "part_max": part_max, "part_sum": part_sum} | call.operands
        vectors = cdiv(rows_per_item(spec), rows_per_vector(spec))
        at_a_time = min(MAX_VECTORS_PER_BLOCK, vectors)

        def fold(number: Any, _: Any) -> None:
            refs = {"output": output_ref, "lse": sums}
            fold_item_rows(spec, operands, refs, (item.query_row, head), number * at_a_time, at_a_time)

        lax.fori_loop(0, vectors // at_a_time, fold, None)


def _store_split(call: Call, item: WorkItem, number: Any, state: ConsumerState) -> None:
    """Stores one split of an item that is cut."""
    spec = call.spec
    if not spec.slots_per_segment:
        return
    slot = stored_slot(spec, item, number)
    _, _, parts, part_max, part_sum = call.outputs

    @pl.when(~item.has_all_steps)
    def _store() -> None:
        rows = parts.at[pl.ds(slot * spec.slot_rows, WGMMA_M), :]
        arrays.store_first_rows(rows, state.unnormalised_output, spec.slot_rows)
        part_max[slot] = state.row_max
        part_sum[slot] = state.row_sum


def stored_slot(spec: PagedSpec, item: WorkItem, number: Any) -> Any:
    """Returns the slot of a split of an item that is cut; `number` counts the program's splits of the item."""
    segment, head = (f(item.partial_result_slot, I32(spec.tiles_per_item)) for f in (lax.div, lax.rem))
    return (segment * spec.slots_per_segment + number) * spec.tiles_per_item + head


def _fold_or_write(
    call: Call, item: WorkItem, is_last: Any, tile: Any, totals: RowTotals, weights: fixed_splits.FoldWeights
) -> None:
    """Folds a split of an item of which this program has all; with the last one, writes the item's rows.

    Args:
        call: The launch.
        item: The item.
        is_last: Whether it is the item's last split.
        tile: The split's accumulator.
        totals: Maxima and sums, the split included.
        weights: Factors of the fold.
    """
    spec, total = call.spec, call.shared.split_total

    @pl.when(item.has_all_steps & ~is_last)
    def _fold() -> None:
        fixed_splits.fold_into_thread_tile(total, tile, weights)

    @pl.when(item.has_all_steps & is_last)
    def _write() -> None:
        folded = fixed_splits.folded_thread_tile(total, tile, weights)
        scale = fixed_splits.output_scale(totals, spec.value_scale)
        output = folded * broadcast_to_columns(scale, (WGMMA_M, spec.value_dim))
        write_item_rows(call, item, output.astype(spec.dtype), fixed_splits.log_sum_exp(totals))


def write_item_rows(call: Call, item: WorkItem, output: Any, lse: Any) -> None:
    """Writes output and lse of an item: to their rows of the call if queries are read in place, else to a tile."""
    spec, (output_ref, sums, *_) = call.spec, call.outputs
    _, head = program_and_head_tile(call)
    if spec.queries_in_place:
        first, offset = item_rows(spec, call.operands["items"][item.query_row, 6], head)
        rows = pl.ds(first, WGMMA_M)
        arrays.store_row_range(output_ref.at[rows, :], output, offset, spec.heads_per_tile)
        arrays.store_row_vector_range(sums.at[rows], lse, offset, spec.heads_per_tile)
        return
    number = item.query_row * spec.tiles_per_item + head
    arrays.store_first_rows(output_ref.at[pl.ds(number * WGMMA_M, WGMMA_M), :], output, spec.slot_rows)
    sums[pl.ds(number * WGMMA_M, WGMMA_M)] = lse


def _attend_block(
    call: Call,
    item: WorkItem,
    first_token_position: Any,
    step: Any,
    blocks_done: Any,
    state: ConsumerState,
    last_step: Any = None,
) -> ConsumerState:
    """Adds a block of keys.

    Args:
        call: The launch.
        item: The item.
        first_token_position: Position of the tile's first token.
        step: The block, counted from the item's first step.
        blocks_done: The program's earlier blocks.
        state: The state before the block.
        last_step: The item's last step, counted from key 0, after whose scores the queries are freed; None if the
            caller frees them.
    """
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
    if last_step is not None:
        pl.when(item.first_step + step == last_step)(lambda: plgpu.barrier_arrive(shared.q_free))
    masked = functools.partial(_mask_scores, call, item, scores, key, first_token_position, present)
    if spec.split_keys:
        scores = lax.cond(_is_full_block(call, item, key, first_token_position, present), lambda: scores, masked)
    else:
        scores = masked()
    row_max, row_sum, weights, alpha = _exponentiate(spec, scores, state)
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


def _exponentiate(spec: PagedSpec, scores: Any, state: ConsumerState) -> tuple[Any, ...]:
    """Returns the new maxima and sums, the weights, and the factor of the output."""
    if spec.split_keys:  # the instructions of prefill
        return add_key_block(scores, spec.softmax_scale_log2, state.row_max, state.row_sum)
    row_max = jnp.maximum(state.row_max, scores.max(axis=1))
    weights = jnp.exp2(scores - broadcast_to_columns(row_max, scores.shape))
    # A row without any key so far has weights of 1: its first key makes alpha exp2(MASKED_SCORE - m) = 0.
    alpha = jnp.exp2(state.row_max - row_max)
    return row_max, state.row_sum * alpha + weights.sum(axis=1), weights, alpha


def _is_full_block(call: Call, item: WorkItem, first_key: Any, first_token_position: Any, valid_key_bits: Any) -> Any:
    """Returns whether all rows attend to all keys of a block; arguments are those of `_mask_scores`."""
    spec = call.spec
    is_full = (item.key_end - first_key >= KEYS_PER_STEP) & (first_key >= item.first_key)
    if spec.pages_per_table_row:
        all_bits = (1 << (KEYS_PER_STEP // SWIZZLE_ATOM_ROWS)) - 1
        is_full = is_full & (jnp.bitwise_and(valid_key_bits, all_bits) == all_bits)
    if spec.tokens_per_tile > 1:
        distance = first_key - first_token_position
        if spec.right_window is not None:  # of the last key to the first token
            is_full = is_full & (distance + (KEYS_PER_STEP - 1) <= spec.right_window)
        if spec.left_window is not None:  # of the first key to the last token
            is_full = is_full & (distance - (spec.tokens_per_tile - 1) >= -spec.left_window)
    return is_full


def _mask_scores(
    call: Call, item: WorkItem, scores: Any, first_key: Any, first_token_position: Any, valid_key_bits: Any
) -> Any:
    """Returns scores in base 2, `MASKED_SCORE` where a row does not attend; with splits raw products and -inf.

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
    if spec.split_keys:
        return jnp.where(is_attended, scores, -jnp.inf)
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
