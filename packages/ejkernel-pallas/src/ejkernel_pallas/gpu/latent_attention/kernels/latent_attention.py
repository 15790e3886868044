"""The latent kernel: two consumer warpgroups that share 64 query heads of a row, and a producer warpgroup.

A step has two blocks of 64 keys. Each warpgroup multiplies the queries with one of them and exponentiates its scores;
both multiply both blocks of weights with their half of the values. A latent vector is key and value, and is copied
once.

    warpgroup 0     Q K0 | softmax 0 | P0 V0 left             | P1 V1 left           accumulator 64 x 256, left
    warpgroup 1          | Q K1      | P0 V0 right, softmax 1 | P1 V1 right          accumulator 64 x 256, right
                               P0 and its maximum       P1 and its maximum           through shared memory

Warpgroup 1 issues its product with the queries after that of warpgroup 0, so that the tensor cores work during softmax
0, and P0's product after its own, before it waits for scores, so that they work during softmax 1.

Warpgroup 0 issues the first piece of its next block's product after P1's product, so that the tensor cores need not
wait for it. Queries and keys are in chunks of 64 columns. Two of nine chunks of the queries are in registers: shared
memory delivers 128 bytes per cycle, exactly what a product of 64 x 64 needs with both operands there, and reading it
costs power, which limits the clock.

The running maximum passes from block 0 to block 1, and from there to block 0 of the next step, so both accumulators are
relative to the same one. Weights reuse the memory of their block's rotary columns, which only the product with the
queries reads. The half of a block that only its own warpgroup reads as values is free first.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from ejkernel.arithmetic import LN2
from ejkernel_pallas.gpu.hopper import arrays, wgmma
from ejkernel_pallas.gpu.hopper.arrays import broadcast_to_columns
from ejkernel_pallas.gpu.hopper.lazy_rescaling import rescale_lazily, update_max_lazily
from ejkernel_pallas.gpu.hopper.ping_pong import ping_pong_pass, ping_pong_wait
from ejkernel_pallas.gpu.hopper.row_ranges import zero_rows_outside
from ejkernel_pallas.gpu.hopper.sizes import I32, ROWS_PER_WARP, WGMMA_M
from ejkernel_pallas.gpu.latent_attention.kernels.call import Call, WorkItem, for_each_item, program_and_head_tile
from ejkernel_pallas.gpu.latent_attention.kernels.producer import produce
from ejkernel_pallas.gpu.latent_attention.spec import (
    BLOCK_KV,
    CHUNKS_PER_HALF,
    CONSUMER_WARPGROUPS,
    HALF_COLUMNS,
    KEYS_PER_STEP,
    PIECES_PER_HALF,
    REGISTERS_PER_THREAD,
    RESCALE_THRESHOLD,
    SWIZZLE_ATOM_ROWS,
)

ALL_KEY_GROUPS_VALID_BITS = (1 << BLOCK_KV // SWIZZLE_ATOM_ROWS) - 1
"""The bits of a block whose keys all exist."""
QueryChunks = dict[int, Any]
"""Chunks of the queries in registers, by index."""
REGISTER_CHUNK_INDICES = (2 * CHUNKS_PER_HALF - 1, 2 * CHUNKS_PER_HALF)
"""Indices of these chunks, 16 registers each; more would spill. The last one of the right half never starts a
product.
"""


class BlockKeyLimits(NamedTuple):
    """The keys of a block that a row attends to.

    Attributes:
        first_key: Index of the first one in the block.
        key_end: Index of the first later key that it does not attend to.
        is_partial: Whether the row attends to only some keys of the block.
    """

    first_key: Any
    key_end: Any
    is_partial: Any


class ScoresInFlight(NamedTuple):
    """A product of the queries with a block of keys that is in flight.

    Attributes:
        scores: Accumulator registers, not valid before the product has ended.
        limits: The keys that the row attends to.
        may_be_masked: Whether there may be masked keys.
        valid_key_bits: Groups of keys that exist, one bit each.
    """

    scores: Any
    limits: BlockKeyLimits
    may_be_masked: Any
    valid_key_bits: Any


class ConsumerState(NamedTuple):
    """The state that a consumer warpgroup carries from step to step.

    Attributes:
        unnormalised_output: [64, 256], its half of the unnormalised output.
        row_max: [64] running maximum, in base 2.
        row_sum: [64] sums of the weights of the blocks it scores.
        next_scores: The first piece of warpgroup 0's next product, in flight.
    """

    unnormalised_output: Any
    row_max: Any
    row_sum: Any
    next_scores: Any = None


def latent_kernel(call: Call) -> None:
    """Runs one thread block of the kernel."""
    warpgroup = lax.axis_index("warpgroup")
    # Each warpgroup has its own code, since their steps wait for different events.
    for number, step in enumerate((_step_of_first_warpgroup, _step_of_second_warpgroup)):

        @pl.when(warpgroup == number)
        def _run_consumer(warpgroup_index: int = number, step: Any = step) -> None:
            # The accumulator takes 128 registers per thread.
            plgpu.set_max_registers(REGISTERS_PER_THREAD[0], action="increase")
            for_each_item(call, lambda item, carry: _consume_item(call, warpgroup_index, step, item, carry), I32(0))

    @pl.when(warpgroup == CONSUMER_WARPGROUPS)
    def _run_producer() -> None:
        plgpu.set_max_registers(REGISTERS_PER_THREAD[1], action="decrease")
        program_and_tile = program_and_head_tile(call)

        # One warp suffices; the others would use power for the same instructions.
        @plgpu.warp_map
        def _run_warp(warp: Any) -> None:
            pl.when(warp == 0)(lambda: produce(call, program_and_tile))


def _consume_item(call: Call, warpgroup: int, run_step: Any, item: WorkItem, carry: Any) -> Any:
    """Computes a warpgroup's half of the output for a program's steps of an item."""
    shared = call.shared
    plgpu.barrier_wait(shared.q_full)
    queries = {chunk: arrays.load_score_tile(shared.query_chunks.at[chunk]) for chunk in REGISTER_CHUNK_INDICES}
    lowest_max = arrays.fill_row_vector(WGMMA_M, call.spec.masked_score)
    state = ConsumerState(arrays.zero_tile((WGMMA_M, HALF_COLUMNS)), lowest_max, arrays.fill_row_vector(WGMMA_M, 0.0))
    if warpgroup == 0:
        state = state._replace(next_scores=_issue_scores_of_piece(call, item, (0, item.first_step, 0), queries))
    body = functools.partial(run_step, call, item, queries)
    state = lax.fori_loop(item.first_step, item.first_step + item.num_steps, body, state)
    if warpgroup == 0:
        # The last step has also issued a piece, with keys that are not this item's; the result is not used.
        wgmma.wait_for_products(state.next_scores, max_in_flight=0)
    # Each warpgroup has summed the weights of the blocks that it scored; both divide by the total. The sums are
    # overwritten in the next item at the earliest, whose first step waits for the other's weights: those are published
    # after the other has read the sums of this item.
    shared.row_sum.at[warpgroup][...] = state.row_sum
    plgpu.barrier_arrive(shared.row_sums_full.at[warpgroup])
    plgpu.barrier_wait(shared.row_sums_full.at[1 - warpgroup])
    total = state.row_sum + arrays.load_row_vector(shared.row_sum.at[1 - warpgroup])
    # `total` is not 0: a row without keys has weights of exp2(lowest - lowest) = 1, times values that are zeros.
    output = state.unnormalised_output * broadcast_to_columns(
        call.spec.value_scale / total, state.unnormalised_output.shape
    )
    _write_half_of_output(call, warpgroup, item, output, state.row_max * LN2 + jnp.log(total))
    return carry


def _step_of_first_warpgroup(
    call: Call, item: WorkItem, queries: QueryChunks, step: Any, state: ConsumerState
) -> ConsumerState:
    """Performs a step of the warpgroup that scores block 0 and accumulates the left half."""
    shared = call.shared
    issued = _issue_scores(call, item, (0, step), queries, state.next_scores)
    ping_pong_pass(CONSUMER_WARPGROUPS)
    scores = _wait_for_scores(call, issued, max_in_flight=0)
    _free_queries(call, item, step)
    row_max = _update_row_max(call, state.row_max, scores)
    exp2_of_scores = _unnormalised_weights(call, scores, row_max)
    alpha = jnp.exp2(state.row_max - row_max)
    # Summed here, since the weights take registers until the product has started.
    row_sum = state.row_sum * alpha + exp2_of_scores.sum(axis=1)
    # Before its own product, since warpgroup 1 waits for these weights.
    weights = _publish_weights(call, 0, exp2_of_scores, row_max)
    output = _rescale_output(call, state.unnormalised_output, alpha)
    output = wgmma.accumulate_product(output, weights, shared.key_left_half_chunks.at[0])
    output = wgmma.wait_for_products(output, max_in_flight=0)
    # Only this warpgroup reads this half of block 0 as values.
    plgpu.barrier_arrive(shared.half_read_by_one_warpgroup_free.at[0])
    plgpu.barrier_wait(shared.weights_full.at[1])
    # The maximum after block 1, which P1 is relative to.
    new_row_max = arrays.load_row_vector(shared.row_max.at[1])
    alpha = jnp.exp2(row_max - new_row_max)
    output = _rescale_output(call, output, alpha)
    # P1 is in the memory of block 1's rotary columns.
    output = wgmma.accumulate_product(output, shared.rotary_columns.at[1], shared.key_left_half_chunks.at[1])
    # The keys' memory was free before P1 was awaited, so the keys have usually arrived. With the product itself in a
    # branch for the last step, the compiler would wait for it at the branch's end; so only the wait for keys is in a
    # branch.
    has_next_step = step + 1 < item.first_step + item.num_steps
    scores = _issue_scores_of_piece(call, item, (0, step + 1, 0), queries, block_exists=has_next_step)
    output = wgmma.wait_for_products(output, max_in_flight=1)
    # Warpgroup 1 read this half as keys before it published P1, so this product was the last to read it.
    plgpu.barrier_arrive(shared.half_read_by_both_warpgroups_free.at[1])
    # The sum is rescaled too: sums of both warpgroups are relative to `new_row_max`, since they are added at the end.
    return ConsumerState(output, new_row_max, row_sum * alpha, scores)


def _step_of_second_warpgroup(
    call: Call, item: WorkItem, queries: QueryChunks, step: Any, state: ConsumerState
) -> ConsumerState:
    """Performs a step of the warpgroup that scores block 1 and accumulates the right half.

    The product with the other's weights is in flight while this one exponentiates its scores.
    """
    shared = call.shared
    ping_pong_wait(CONSUMER_WARPGROUPS)
    issued = _issue_scores(call, item, (1, step), queries)
    plgpu.barrier_wait(shared.weights_full.at[0])
    before = arrays.load_row_vector(shared.row_max.at[0])
    output = _rescale_output(call, state.unnormalised_output, jnp.exp2(state.row_max - before))
    output = wgmma.accumulate_product(output, shared.rotary_columns.at[0], shared.key_right_half_chunks.at[0])
    scores = _wait_for_scores(call, issued, max_in_flight=1)
    _free_queries(call, item, step)
    row_max = _update_row_max(call, before, scores)
    exp2_of_scores = _unnormalised_weights(call, scores, row_max)
    row_sum = state.row_sum * jnp.exp2(state.row_max - row_max) + exp2_of_scores.sum(axis=1)
    weights = _publish_weights(call, 1, exp2_of_scores, row_max)
    output = wgmma.wait_for_products(output, max_in_flight=0)
    # Warpgroup 0 read this half as keys before it published P0.
    plgpu.barrier_arrive(shared.half_read_by_both_warpgroups_free.at[0])
    # The accumulator is not touched before this point, since the product was writing it.
    output = _rescale_output(call, output, jnp.exp2(before - row_max))
    output = wgmma.wait_for_products(
        wgmma.accumulate_product(output, weights, shared.key_right_half_chunks.at[1]), max_in_flight=0
    )
    plgpu.barrier_arrive(shared.half_read_by_one_warpgroup_free.at[1])
    return ConsumerState(output, row_max, row_sum)


def _free_queries(call: Call, item: WorkItem, step: Any) -> None:
    """After the last scores of an item, frees the queries for the next item: only scores read them."""
    last = step + 1 == item.first_step + item.num_steps
    pl.when(last)(lambda: plgpu.barrier_arrive(call.shared.q_free))


def _block_key_limits(call: Call, item: WorkItem, block: int, step: Any) -> BlockKeyLimits:
    key = step * KEYS_PER_STEP + block * BLOCK_KV
    first, end = item.first_key - key, item.key_end - key
    partial = end < BLOCK_KV
    if call.spec.has_key_starts:
        partial = partial | (first > 0)
    return BlockKeyLimits(first, end, partial)


def _issue_scores_of_piece(
    call: Call,
    item: WorkItem,
    block_step_and_piece: tuple[int, Any, int],
    queries: QueryChunks,
    scores: Any = None,
    block_exists: Any = True,
) -> Any:
    """Issues the product of the queries with a piece of a block of keys.

    Args:
        call: The launch.
        item: The item whose keys they are.
        block_step_and_piece: Block, step, and index of the piece in the order of copies.
        queries: The chunks in registers.
        scores: The accumulator of the pieces before, if any.
        block_exists: Whether there is such a block. If not, the product reads whatever is in its memory.
    """
    shared, (block, step, piece) = call.shared, block_step_and_piece
    limits = _block_key_limits(call, item, block, step)
    # The half that is copied first is multiplied first.
    second_half, piece_in_half = divmod(piece, PIECES_PER_HALF)
    half = second_half if block == 0 else 1 - second_half
    keys = (shared.key_left_half_chunks, shared.key_right_half_chunks)[half].at[block]
    full = (shared.half_read_by_one_warpgroup_full, shared.half_read_by_both_warpgroups_full)[second_half].at[
        block * PIECES_PER_HALF + piece_in_half
    ]
    pl.when(block_exists)(lambda: plgpu.barrier_wait(full))
    chunks_per_piece = CHUNKS_PER_HALF // PIECES_PER_HALF
    chunks = range(piece_in_half * chunks_per_piece, piece_in_half * chunks_per_piece + chunks_per_piece)
    pl.when(limits.is_partial & block_exists)(lambda: _zero_masked_rows([keys.at[chunk] for chunk in chunks], limits))
    chunk_indices = {chunk: half * CHUNKS_PER_HALF + chunk for chunk in chunks}
    pairs = [(shared.query_chunks.at[n], keys.at[chunk]) for chunk, n in chunk_indices.items() if n not in queries]
    # One group of products, as `wait_for_products` counts them.
    scores_in_flight: jax.Array = (
        wgmma.issue_scores(*pairs[0], *pairs[1:]) if scores is None else wgmma.add_to_scores(scores, *pairs)
    )
    for chunk, n in chunk_indices.items():
        scores_in_flight = (
            wgmma.add_to_scores_from_registers(scores_in_flight, queries[n], keys.at[chunk])
            if n in queries
            else scores_in_flight
        )
    return scores_in_flight


def _issue_scores(
    call: Call, item: WorkItem, block_and_step: tuple[int, Any], queries: QueryChunks, scores: Any = None
) -> ScoresInFlight:
    """Issues the product of the queries with a block of keys, or the rest of it after the first piece."""
    shared, (block, step) = call.shared, block_and_step
    limits = _block_key_limits(call, item, block, step)
    scores_in_flight: Any = scores
    for piece in range(0 if scores is None else 1, 2 * PIECES_PER_HALF):
        scores_in_flight = _issue_scores_of_piece(call, item, (block, step, piece), queries, scores_in_flight)
    rotary = shared.rotary_columns.at[block]
    plgpu.barrier_wait(shared.rotary_full.at[block])
    pl.when(limits.is_partial)(lambda: _zero_masked_rows([rotary], limits))
    scores_in_flight = wgmma.add_to_scores_from_registers(scores_in_flight, queries[2 * CHUNKS_PER_HALF], rotary)
    present, masked = shared.valid_key_bits[block], limits.is_partial
    if call.spec.pages_per_table_row:
        masked = masked | (jnp.bitwise_and(present, ALL_KEY_GROUPS_VALID_BITS) != ALL_KEY_GROUPS_VALID_BITS)
    return ScoresInFlight(scores_in_flight, limits, masked, present)


def _wait_for_scores(call: Call, issued_scores: ScoresInFlight, max_in_flight: int) -> Any:
    """Returns the scores of a block, `masked_product` for missing keys, once at most `max_in_flight` later products are
    unfinished.

    They are raw products: the instruction that subtracts the maximum also multiplies by `exp2_factor`, to base 2.
    """
    scores = wgmma.wait_for_products(issued_scores.scores, max_in_flight=max_in_flight)
    if call.spec.exp2_factor != call.spec.softmax_scale_log2:
        scores = scores * call.spec.softmax_scale_log2
    # Nearly all blocks have all their keys.
    return lax.cond(issued_scores.may_be_masked, lambda x: _mask_scores(call, issued_scores, x), lambda x: x, scores)


def _mask_scores(call: Call, issued_scores: ScoresInFlight, scores: Any) -> Any:
    column = plgpu.broadcasted_iota(I32, scores.shape, 1, layout=plgpu.Layout.WGMMA)
    is_before_end = column < issued_scores.limits.key_end
    if call.spec.has_key_starts:
        is_before_end = is_before_end & (column >= issued_scores.limits.first_key)
    if call.spec.pages_per_table_row:
        group_bits = jnp.right_shift(issued_scores.valid_key_bits, lax.div(column, I32(SWIZZLE_ATOM_ROWS)))
        is_before_end = is_before_end & (jnp.bitwise_and(group_bits, 1) > 0)
    return jnp.where(is_before_end, scores, call.spec.masked_product)


def _unnormalised_weights(call: Call, scores: Any, row_max: Any) -> Any:
    """Returns weights in float32."""
    return jnp.exp2(scores * call.spec.exp2_factor - broadcast_to_columns(row_max, scores.shape))


def _zero_masked_rows(tiles: list[Any], limits: BlockKeyLimits) -> None:
    """Writes zeros to the masked rows of tiles: they may hold NaN, and a weight of zero times NaN is NaN."""
    for tile in tiles:
        zero_rows_outside(tile, limits.first_key, limits.key_end)
    plgpu.commit_smem()


def _publish_weights(call: Call, block: int, weights: Any, row_max: Any) -> Any:
    """Passes the weights of a block, and the maximum that they are relative to, to the other warpgroup."""
    shared = call.shared
    # Rounded once: warpgroup 0 multiplies the registers and warpgroup 1 this memory, with the same values.
    weights = lax.optimization_barrier(weights.astype(call.spec.dtype))
    # The product with the queries, the only one that reads rotary columns, has ended: its scores were awaited.
    shared.rotary_columns.at[block][...] = weights
    shared.row_max.at[block][...] = row_max
    # No warpgroup barrier is needed: this one uses its registers, and the other waits for all threads.
    wgmma.fence_shared_memory_writes()
    plgpu.barrier_arrive(shared.weights_full.at[block])
    return weights


def _update_row_max(call: Call, row_max: Any, scores: Any) -> Any:
    """Returns the running maximum after a block."""
    if call.spec.rescales_lazily:
        return update_max_lazily(row_max, scores, call.spec.exp2_factor, RESCALE_THRESHOLD)
    return jnp.maximum(row_max, scores.max(axis=1) * call.spec.exp2_factor)


def _rescale_output(call: Call, output: Any, alpha: Any) -> Any:
    return (
        rescale_lazily(output, alpha)
        if call.spec.rescales_lazily
        else output * broadcast_to_columns(alpha, output.shape)
    )


def _write_half_of_output(call: Call, warpgroup: int, item: WorkItem, output: Any, lse: Any) -> None:
    """Writes a warpgroup's half of the rows of an item, or of a partial result."""
    output_ref, lse_ref, partial_ref, partial_lse_ref = call.outputs
    _, tile = program_and_head_tile(call)
    output_tile, columns = (
        item.query_row * call.spec.tiles_per_item + tile,
        pl.ds(warpgroup * HALF_COLUMNS, HALF_COLUMNS),
    )

    @pl.when(item.has_all_steps)
    def _write_whole_item() -> None:
        # Directly from registers: shared memory has no room for an output, which is written once per item.
        target = output_ref.at[pl.ds(output_tile * WGMMA_M, WGMMA_M), columns]
        rounded = output.astype(call.spec.dtype)
        if call.spec.stored_rows_per_tile > WGMMA_M - ROWS_PER_WARP:
            arrays.store_16_byte_rows(target, rounded)
        else:
            arrays.store_first_rows(target, rounded, call.spec.stored_rows_per_tile)
        # Both warpgroups have the same lse, so one writes it.
        if warpgroup == 0:
            lse_ref[output_tile] = lse

    @pl.when(~item.has_all_steps)
    def _write_partial_result() -> None:
        # Divided by its own denominator: exp(lse) is its weight when partial results are merged.
        arrays.store_first_rows(
            partial_ref.at[item.partial_result_slot, :, columns], output, call.spec.stored_rows_per_tile
        )
        if warpgroup == 0:
            partial_lse_ref[item.partial_result_slot] = lse
