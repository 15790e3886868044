"""The forward kernel: warp-specialised, persistent, with ping-pong scheduling (Shah et al. 2024, FlashAttention-3).

    producer warpgroup    TMA K(j+1) | TMA V(j) | TMA K(j+2) | TMA V(j+1) | ...          stages of k, v in smem
                              │ k_full, v_full ▲ k_free, v_free
    consumer warpgroup 0  issue S(j), P(j-1)V │ exponentials of S(j) │ rescale acc │ issue S(j+1), P(j)V │ ...
    consumer warpgroup 1       exponentials   │ issue S, PV          │ exponentials│ rescale             │ ...
                                              └ ping_pong_pass / ping_pong_wait

A thread block loops over query tiles from the tile scheduler; each consumer warpgroup has 64 rows of a tile. One step
issues S(j) = Q K(j)^T and then acc += P(j-1) V(j-1), so the tensor cores work on the second product while the
warpgroup exponentiates the first (intra-warpgroup overlap). With ping-pong scheduling another warpgroup issues its two
products in that time (inter-warpgroup overlap).
"""

import dataclasses
import functools
from typing import Any, Literal, NamedTuple

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from ejkernel.arithmetic import LN2, LOG2E
from ejkernel_pallas.gpu.hopper import arrays, fixed_splits, tile_scheduler, wgmma
from ejkernel_pallas.gpu.hopper.arrays import broadcast_to_columns
from ejkernel_pallas.gpu.hopper.layouts import ROW_LAYOUT
from ejkernel_pallas.gpu.hopper.ping_pong import ping_pong_pass, ping_pong_wait
from ejkernel_pallas.gpu.hopper.sizes import I32, WGMMA_M
from ejkernel_pallas.gpu.tiled_attention.kernels import (
    forward_producer,
    online_softmax,
    paged_producer,
    pair_functions,
    split_totals,
    tile_masks,
)
from ejkernel_pallas.gpu.tiled_attention.kernels.dropout import zero_dropped_weights
from ejkernel_pallas.gpu.tiled_attention.kernels.forward_call import (
    Call,
    QueryTile,
    query_tile_of_warpgroup,
    wait_for_next_tile,
)
from ejkernel_pallas.gpu.tiled_attention.kernels.forward_outputs import release_queries, write_output
from ejkernel_pallas.gpu.tiled_attention.plan.key_ranges import UNSORTED_MARK
from ejkernel_pallas.gpu.tiled_attention.spec import INITIAL_ROW_MAX

MaskedBounds = Literal["lower", "both"] | None
"""The masks that a partial block needs: `"both"` bounds of the key range, or, before the full blocks, the `"lower"`
bound only; None for a full block.
"""


class ConsumerState(NamedTuple):
    """The state that a consumer warpgroup carries from key block to key block, all in registers.

    Attributes:
        key_blocks_done: Key blocks since the kernel started; pipeline stage and mbarrier parity follow from it.
        acc: Accumulator of P V, without the last key block.
        row_max: Running maximum of every row, in base 2.
        row_sum: Running sum of every row, over a thread's own columns.
        weights: P of the last key block, not yet multiplied by its values.
        totals: Number, maximum and sum of the splits that have been folded; None without splits.
    """

    key_blocks_done: Any
    acc: Any
    row_max: Any
    row_sum: Any
    weights: Any
    totals: split_totals.FoldedSplits | None = None


def forward_kernel(call: Call) -> None:
    """Runs one thread block of the kernel: the main loop of every warpgroup over the block's work tiles."""
    warpgroup, tile = lax.axis_index("warpgroup"), call.tile
    consumer_registers, producer_registers = tile.registers_per_thread(call.spec)
    first = lax.axis_index("block")
    # Carried from tile to tile: work tiles so far, key blocks so far, the tile's index and its key blocks.
    start = I32(0), I32(0), first, tile_scheduler.block_bounds(call.schedule, call.operands["table"], first)

    # Read once: the number of sequences, and so of tiles, is known only on the device.
    items = (
        call.schedule.num_items
        if call.paged_key_access is None
        else call.paged_key_access.load_num_live_tiles(call.operands)
    )

    def for_each_tile(body: Any) -> None:
        lax.while_loop(lambda carry: carry[2] < items, functools.partial(body, call), start)

    @pl.when(warpgroup < tile.consumer_warpgroups)
    def _consume() -> None:
        # Registers move from the producer, which needs few, to the consumers: ptxas allots the same number to all
        # threads.
        plgpu.set_max_registers(consumer_registers, action="increase")
        if call.spec.uses_ping_pong:
            # The last warpgroup passes first, so that warpgroup 0 finds its barrier open and all others wait.
            pl.when(warpgroup == tile.consumer_warpgroups - 1)(
                functools.partial(ping_pong_pass, tile.consumer_warpgroups)
            )
        for_each_tile(_process_query_tile)
        # The block must not end before the last output has been copied out of its shared memory.
        plgpu.wait_smem_to_gmem(0)

    @pl.when(warpgroup == tile.consumer_warpgroups)
    def _produce() -> None:
        plgpu.set_max_registers(producer_registers, action="decrease")
        for_each_tile(forward_producer.produce if call.paged_key_access is None else paged_producer.produce)


def _process_query_tile(call: Call, carry: Any) -> Any:
    """Computes one work tile of a consumer: prologue, main loop over partial and full blocks, last product,
    epilogue.
    """
    nth_tile, step, number, (start, full_start, full_end, stop) = carry
    spec, shared, warpgroup = call.spec, call.shared, lax.axis_index("warpgroup")
    item, buffer = tile_scheduler.locate_work_tile(call.schedule, number), call.query_buffer_index(nth_tile, warpgroup)
    next_item = wait_for_next_tile(call, nth_tile)
    plgpu.barrier_wait(shared.q_full.at[buffer])
    query_tile = query_tile_of_warpgroup(call, item, buffer, warpgroup)
    state = _prologue(call, query_tile, start, step)
    if spec.blocks_per_split:
        # Outputs are written through the memory of totals, which TMA has read by now, a whole prologue later.
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    elif call.tile.query_buffers > 1:
        # Outputs are written through the buffer of their queries. The last tile's buffer is free once TMA has read it,
        # as it has by now, a whole prologue later: this does not stall.
        pl.when(nth_tile > 0)(lambda: release_queries(call, call.query_buffer_index(nth_tile - 1, warpgroup)))
    process_block = functools.partial(_process_key_block, call, query_tile)
    end = _key_block_end(call, query_tile, start, stop)
    if call.tile.needs_masks(spec):
        # The prologue has processed the first key block, with all masks.
        full_start, full_end = jnp.maximum(full_start, start + 1), jnp.maximum(full_end, start + 1)
        if call.tile.idle_warpgroups_skip_keys(spec):
            full_start, full_end = jnp.minimum(full_start, end), jnp.minimum(full_end, end)
        if spec.masks_before_full_tiles:
            state = lax.fori_loop(start + 1, full_start, functools.partial(process_block, "lower"), state)
        state = _process_full_blocks(call, functools.partial(process_block, None), full_start, full_end, state)
        state = lax.fori_loop(full_end, end, functools.partial(process_block, "both"), state)
    else:
        state = lax.fori_loop(start + 1, stop, functools.partial(process_block, None), state)
    if spec.blocks_per_split:
        # All scores are done, and no output is written through the queries' buffer.
        plgpu.barrier_arrive(shared.q_free.at[buffer])
    _epilogue(call, query_tile, split_totals.add_last_split(call, _add_last_product(call, state)))
    step = (
        state.key_blocks_done
        if end is stop
        else lax.fori_loop(end, stop, functools.partial(_skip_key_block, call), state.key_blocks_done)
    )
    if call.tile.query_buffers == 1 and not spec.blocks_per_split:
        release_queries(call, buffer)
    return nth_tile + 1, step, *next_item


def _key_block_end(call: Call, query_tile: QueryTile, first_block: Any, end_block: Any) -> Any:
    """Returns the end of the key blocks that a warpgroup's rows need; every warpgroup processes the first one."""
    spec, end = call.spec, end_block
    if spec.right_window is not None and call.tile.first_warpgroup_may_end_early(spec):
        last = query_tile.first_query + (WGMMA_M - 1 + spec.right_window)
        end = jnp.clip(lax.div(last, I32(call.tile.block_kv)) + 1, first_block + 1, end_block)
    return (
        jnp.where(query_tile.first_query < spec.q_len, end, first_block + 1)
        if call.tile.idle_warpgroups_skip_keys(spec)
        else end
    )


def _prologue(call: Call, query_tile: QueryTile, first_block: Any, key_blocks_done: Any) -> ConsumerState:
    """Processes the first key block, before which there are no weights to multiply."""
    slot = call.stage_of_key_block(key_blocks_done)
    plgpu.barrier_wait(call.shared.k_full.at[slot])
    scores = wgmma.wait_for_products(_issue_scores(call, query_tile, slot), max_in_flight=0)
    masking: MaskedBounds = "both" if call.tile.needs_masks(call.spec) else None
    valid_key_words = _valid_key_bits(call, masking, slot)
    plgpu.barrier_arrive(call.shared.k_free.at[slot])
    mask = _load_key_block_mask(call, query_tile, first_block, masking).add_mask_words(valid_key_words)
    scores = _cap_and_mask_scores(call, query_tile, mask, masking, scores)
    # INITIAL_ROW_MAX is finite: in a row without any key so far, -inf - -inf would be NaN.
    row_max, row_sum = (
        arrays.fill_row_vector(WGMMA_M, 0.0 if call.spec.fixes_row_max_at_zero else INITIAL_ROW_MAX),
        arrays.fill_row_vector(WGMMA_M, 0.0),
    )
    row_max, row_sum, weights, _ = online_softmax.exponentiate(call.spec, scores, row_max, row_sum, masking is None)
    weights = _apply_dropout(call, query_tile, key_blocks_done, weights)
    return ConsumerState(
        key_blocks_done + 1,
        arrays.zero_tile((WGMMA_M, call.spec.value_dim)),
        row_max,
        row_sum,
        _weights_as_operand(call, weights),
        split_totals.empty_totals(call.spec),
    )


def _process_full_blocks(call: Call, process_block: Any, first: Any, end: Any, state: ConsumerState) -> ConsumerState:
    """Processes key blocks without masks. Blocks with which splits begin have a copy of the code, so that no others
    test for it.
    """
    if not call.spec.blocks_per_split:
        return lax.fori_loop(first, end, process_block, state)
    boundaries = call.spec.split_boundaries
    inside, begins = (functools.partial(process_block, begins_split=x) for x in (False, True))

    def process_split(carry: Any) -> Any:
        index, state = carry
        stop = jnp.minimum(end, boundaries.next_begin(index))
        return stop, lax.fori_loop(index + 1, stop, inside, begins(index, state))

    middle = jnp.minimum(end, boundaries.next_begin(first - 1))
    state = lax.fori_loop(first, middle, inside, state)
    return lax.while_loop(lambda carry: carry[0] < end, process_split, (jnp.maximum(first, middle), state))[1]


def _process_key_block(
    call: Call,
    query_tile: QueryTile,
    masked_bounds: MaskedBounds,
    index: Any,
    state: ConsumerState,
    begins_split: bool | None = None,
) -> ConsumerState:
    """Processes one key block: its scores S(j), and the last block's P(j-1) V(j-1) while they are exponentiated.

    `begins_split` is whether a split begins with the block, None if its index says it.
    """
    shared, warpgroups = call.shared, call.tile.consumer_warpgroups
    slot, last = call.stage_of_key_block(state.key_blocks_done), call.stage_of_key_block(state.key_blocks_done - 1)

    # A pattern's mask words come from HBM: their loads are in flight while the keys are awaited.
    mask = _load_key_block_mask(call, query_tile, index, masked_bounds)
    begins = split_totals.begins_split(call, index) if begins_split is None else begins_split
    row_max, row_sum = split_totals.rows_before_block(begins, state.row_max, state.row_sum)

    def multiply(issue_product: Any) -> tuple[Any, ...]:
        plgpu.barrier_wait(shared.k_full.at[slot])
        if call.spec.uses_ping_pong:
            ping_pong_wait(warpgroups)
        scores = _issue_scores(call, query_tile, slot)
        plgpu.barrier_wait(shared.v_full.at[last])
        acc = issue_product(shared.v.at[last])
        # Both products are issued; the next warpgroup may issue its own, which are queued after them.
        if call.spec.uses_ping_pong:
            ping_pong_pass(warpgroups)
        # WGMMAs complete in order: with one in flight, S(j) is done and its keys may be overwritten; P V is not.
        scores = wgmma.wait_for_products(scores, max_in_flight=1)
        valid_key_words = _valid_key_bits(call, masked_bounds, slot)
        plgpu.barrier_arrive(shared.k_free.at[slot])
        scores = _cap_and_mask_scores(call, query_tile, mask.add_mask_words(valid_key_words), masked_bounds, scores)
        *rows, weights, alpha = online_softmax.exponentiate(call.spec, scores, row_max, row_sum, masked_bounds is None)
        return acc, *rows, _apply_dropout(call, query_tile, state.key_blocks_done, weights), alpha

    acc, row_max, row_sum, weights, alpha = _run_with_accumulator(call, state, multiply)
    plgpu.barrier_arrive(shared.v_free.at[last])
    # The accumulator now has all blocks before this one.
    totals, alpha = split_totals.fold_finished_split(call, begins, acc, state, alpha)
    # Hazard: registers of an accumulator must not be touched while a WGMMA writes them. It is done here.
    acc = online_softmax.rescale_accumulator(call.spec, acc, alpha)
    return ConsumerState(state.key_blocks_done + 1, acc, row_max, row_sum, _weights_as_operand(call, weights), totals)


def _issue_scores(call: Call, query_tile: QueryTile, slot: Any) -> Any:
    """Issues the product of a warpgroup's queries and a block of keys."""
    queries, keys = call.shared.q.at[query_tile.query_buffer_index], call.shared.k.at[slot]
    if not call.spec.lists_first_keys:
        return wgmma.issue_scores(queries, keys)
    first, *others = ((queries.at[n], keys.at[n]) for n in range(keys.shape[0]))
    return wgmma.issue_scores(*first, *others)


def _run_with_accumulator(call: Call, state: ConsumerState, multiply: Any) -> Any:
    """Returns the results of `multiply(issue_product)`, whose first one is that of `issue_product(values)`: it issues P
    V, which is done when this function returns.
    """
    if call.spec.lists_first_keys:
        acc, *results = multiply(lambda values: wgmma.accumulate_product(state.acc, state.weights, values))
        return wgmma.wait_for_products(acc, max_in_flight=0), *results

    def run(refs: Any) -> None:
        acc_ref, *result_refs = refs
        _, *results = multiply(lambda values: plgpu.wgmma(acc_ref, state.weights, values))
        for ref, value in zip(result_refs, results, strict=True):
            ref[...] = value

    zeros = arrays.zero_tile((WGMMA_M, call.tile.block_kv))
    refs = (plgpu.WGMMAAccumulatorRef.init(state.acc), state.row_max, state.row_sum, zeros, state.row_max)
    # Leaving run_state waits for the product.
    return pl.run_state(run)(refs)


def _skip_key_block(call: Call, _: Any, key_blocks_done: Any) -> Any:
    """Skips a key block that only other warpgroups need: keeps mbarriers and ping-pong in step."""
    shared, warpgroups, slot = call.shared, call.tile.consumer_warpgroups, call.stage_of_key_block(key_blocks_done)
    if call.spec.uses_ping_pong:
        ping_pong_wait(warpgroups)
        ping_pong_pass(warpgroups)
    for full, free in ((shared.k_full, shared.k_free), (shared.v_full, shared.v_free)):
        plgpu.barrier_wait(full.at[slot])
        plgpu.barrier_arrive(free.at[slot])
    return key_blocks_done + 1


class KeyBlockMaskWords(NamedTuple):
    """A key block, and the words of bits that mask its scores.

    Attributes:
        key_block: The key block.
        mask_words: Bits of the pattern, from `tile_masks.load_mask_words`, or of the keys that exist; empty without.
    """

    key_block: Any
    mask_words: tuple[Any, ...] = ()

    def add_mask_words(self, words: tuple[Any, ...]) -> "KeyBlockMaskWords":
        """Returns the mask with further words."""
        return self._replace(mask_words=(*self.mask_words, *words))


def _load_key_block_mask(
    call: Call, query_tile: QueryTile, list_index: Any, masked_bounds: MaskedBounds
) -> KeyBlockMaskWords:
    """Returns the key block at an index of the item's list, and the words of its pattern if it needs them."""
    if masked_bounds is None or not call.spec.has_pattern:
        needs_key_block = masked_bounds is not None or call.spec.score_mod is not None
        return KeyBlockMaskWords(call.key_block_index(query_tile.item, list_index) if needs_key_block else list_index)
    words = call.operands["mask_words"].at[I32(0), call.list_entry("mask_ids", query_tile.item, list_index)]
    row = query_tile.first_query - query_tile.item.tile_in_head * call.tile.block_q
    return KeyBlockMaskWords(
        call.key_block_index(query_tile.item, list_index), tile_masks.load_mask_words(words, row, call.tile.block_kv)
    )


def _valid_key_bits(call: Call, masked_bounds: MaskedBounds, slot: Any) -> tuple[Any, ...]:
    """Returns the word with the existing keys of a block, if the block needs masks and keys are in pages.

    Read before the stage is freed: the producer then writes the word of a later block.
    """
    if masked_bounds is None or call.paged_key_access is None:
        return ()
    return (plgpu.layout_cast(jnp.full((WGMMA_M,), call.shared.valid_key_words[slot], I32), ROW_LAYOUT),)


def _cap_and_mask_scores(
    call: Call, query_tile: QueryTile, mask: KeyBlockMaskWords, masked_bounds: MaskedBounds, scores: Any
) -> Any:
    """Returns scores with soft cap and masks; raw products where `online_softmax.exponentiate` applies the soft cap."""
    spec, key = call.spec, call.first_key(mask.key_block)
    if spec.soft_cap is not None and not (masked_bounds is None and spec.fuses_soft_cap):
        scores = jnp.tanh(scores * spec.product_scale)
    if spec.has_pair_functions:
        batch, head, row = query_tile.item.batch_row, query_tile.item.head, query_tile.first_query
        if not spec.hoists_function_inputs:
            # Addresses are recomputed for every key block: hoisted out of the loop, they would take registers.
            batch, head, row = lax.optimization_barrier((batch, head, row))
        pairs = pair_functions.PairTile(call.operands, batch, head, row, key, rows_are_queries=True)
        scores = pair_functions.modify_scores(spec, scores, pairs)
        scores = scores if masked_bounds is None else pair_functions.mask_pairs(spec, scores, pairs)
    if masked_bounds is None or spec.masks_by_function_alone(call.tile.block_kv):
        return scores
    if query_tile.paged_tile is None:
        first, last, unsorted = *tile_masks.key_column_range(spec, WGMMA_M, query_tile.first_query, key), None
    else:
        first, last, unsorted = *tile_masks.paged_key_column_range(spec, WGMMA_M, query_tile.paged_tile, key), None
    if spec.has_key_ranges:
        first, last, unsorted = _loaded_column_range(call, query_tile, key)
    last = None if masked_bounds == "lower" else last
    return tile_masks.mask_outside_key_range(scores, first, last, unsorted, mask.mask_words)


def _loaded_column_range(call: Call, query_tile: QueryTile, key: Any) -> tuple[Any, Any, Any]:
    """Returns the first and last column of every row with segment ids or positions, and what must be compared."""
    first, last, *first_block = (
        arrays.load_row_vector(call.shared.key_ranges.at[query_tile.query_buffer_index, n])
        for n in range(call.shared.key_ranges.shape[1])
    )
    if call.spec.lists_first_keys:  # keys of documents are contiguous
        # A block of an earlier document may end with keys of the row, which are in a block of its document, too.
        is_of_other_document = first_block[0] > key
        return jnp.where(is_of_other_document, tile_masks.UNREACHABLE_COLUMN, first - key), last - key, None
    # `UNSORTED_MARK` was added to rows whose keys are not one range: there ids or positions are compared.
    unsorted = last >= UNSORTED_MARK
    # Addresses are recomputed for every key block: hoisted out of the loop, they would take registers.
    batch, row = lax.optimization_barrier((query_tile.item.batch_row, query_tile.first_query))
    item, names = dataclasses.replace(query_tile.item, batch_row=batch), ("q_limits", "k_positions")
    q_ids, k_ids = (call.operands[x] for x in (("q_ids", "k_ids") if call.spec.has_segments else names))
    of_rows = item.batch_row_of(q_ids), pl.ds(row, WGMMA_M)
    rows = tuple(q_ids.at[of_rows[0], n, of_rows[1]] for n in (0, 1)) if q_ids.ndim == 3 else (q_ids.at[of_rows],)
    columns = k_ids.at[item.batch_row_of(k_ids), pl.ds(key, call.tile.block_kv)]
    last = jnp.where(unsorted, last - UNSORTED_MARK, last)
    return first - key, last - key, tile_masks.UnsortedKeys(unsorted.astype(jnp.int32), rows, columns)


def _apply_dropout(call: Call, query_tile: QueryTile, key_blocks_done: Any, weights: Any) -> Any:
    """Returns the weights, with dropped weights set to zero."""
    if not call.spec.has_dropout:
        return weights
    rows, columns = (
        arrays.load_row_vector(call.shared.q_dropout_keys.at[query_tile.query_buffer_index]),
        arrays.load_column_vector(call.key_block_dropout_keys(key_blocks_done)),
    )
    return zero_dropped_weights(call.spec, rows, columns, weights)


def _weights_as_operand(call: Call, weights: Any) -> Any:
    """Returns weights in the dtype of the next product, whose A operand they are, in registers.

    Hazard: nothing may write registers that a WGMMA in flight reads. The barrier keeps LLVM from sinking the conversion
    to the next step, where a product is in flight.
    """
    return lax.optimization_barrier(weights.astype(call.spec.dtype))


def _add_last_product(call: Call, state: ConsumerState) -> ConsumerState:
    """Adds P V of the last key block, which overlaps with no scores."""
    slot = call.stage_of_key_block(state.key_blocks_done - 1)

    def product(acc_ref: Any) -> None:
        plgpu.barrier_wait(call.shared.v_full.at[slot])
        plgpu.wgmma(acc_ref, state.weights, call.shared.v.at[slot])

    if call.spec.lists_first_keys:
        plgpu.barrier_wait(call.shared.v_full.at[slot])
        acc = wgmma.accumulate_product(state.acc, state.weights, call.shared.v.at[slot])
        acc = wgmma.wait_for_products(acc, max_in_flight=0)
    else:
        acc = pl.run_state(product)(plgpu.WGMMAAccumulatorRef.init(state.acc))
    plgpu.barrier_arrive(call.shared.v_free.at[slot])
    return state._replace(acc=acc)


def _epilogue(call: Call, query_tile: QueryTile, state: ConsumerState) -> None:
    """Adds the sink to the denominator, normalises the accumulator, and writes output and lse."""
    (_, acc, row_max, row_sum, _, totals), spec = state, call.spec
    if totals is not None:
        output = acc * broadcast_to_columns(fixed_splits.output_scale(totals.rows, spec.dropout_scale), acc.shape)
        write_output(call, query_tile, output, fixed_splits.log_sum_exp(totals.rows))
        return
    row_sum = online_softmax.reduce_row_sum(row_sum)
    if spec.has_sinks:
        sinks = call.operands["sinks"]
        sink = sinks[query_tile.item.batch_row_of(sinks), query_tile.item.head] * LOG2E
        if call.schedule.tail_split.num_split_tiles:  # only the first part of a split tile has the sink
            sink = jnp.where(
                lax.rem(query_tile.item.split_index, I32(call.schedule.tail_split.splits_per_tile)) > 0, -jnp.inf, sink
            )
        # The sink may exceed every score. It has no value, so the accumulator is only rescaled.
        max_with_sink = jnp.maximum(row_max, sink)
        alpha = jnp.exp2(row_max - max_with_sink)
        row_sum, row_max = row_sum * alpha + jnp.exp2(sink - max_with_sink), max_with_sink
        acc = acc * broadcast_to_columns(alpha, acc.shape)
    # A row that attends to nothing gets output 0 and lse -inf.
    has_keys = row_sum > 0
    output_scale = spec.dropout_scale / jnp.where(has_keys, row_sum, 1)
    lse = jnp.where(has_keys, row_max * LN2 + jnp.log(jnp.where(has_keys, row_sum, 1)), -jnp.inf)
    output = acc * broadcast_to_columns(output_scale, acc.shape)
    write_output(call, query_tile, output, lse)
