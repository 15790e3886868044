"""The backward kernel: a block accumulates dk and dv of a key tile, and adds its part of dq in a fixed order.

    producer warp        TMA Q, dO of the next query blocks ─► stages in smem
    consumer warpgroup   S^T(t), dk(t-1) │ exp2, mask ─► P^T │ dP^T(t), dv(t), dq(t-1) │ ds ─► smem │ next
    adder warps          dq(t-1) from smem ─► red.add to HBM, in the order of key tiles

A block has 128 keys, 64 for each of two consumer warpgroups, and loops over query blocks. Scores are transposed, keys
by queries, so that P^T and ds^T are, in the registers in which they are computed, the A operands of dv's and dk's
products. ds also goes to shared memory: dq = ds K contracts over the keys of both warpgroups, and each computes one
half of it.
Overlap: exponentials of step t with dk's product of step t-1, and ds with dv's product and dq's of step t-1. Ping-pong
scheduling overlaps the products of one warpgroup with everything else of the other.

With queries and keys of 192 and values of 128, dk and dv take 160 of a thread's 240 registers: a *register-bound* tile.
There ds stays in shared memory, from where dk's product reads it, and dq of step t-1 is computed after ds of step t, in
the registers of the gradients of weights:

    registers   dk dv 160 | scores 32, weights 16 | gradients of weights 32, of scores 16 | dq 48
    products              | S(t), dk(t-1)         | dP(t), dv(t)                          | dq(t-1)

Each warpgroup computes 96 columns of dq. Queries, keys and ds therefore use the 64-byte swizzle, whose rows of 32
columns divide 96; those of the 128-byte swizzle do not.

Determinism: for every query block, key tiles add to dq in order, by a counter in HBM. All loop from the last query
block to the first. A block that starts a step after its predecessor never waits, and no block waits for one that
started later, so there is no deadlock.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from ejkernel_pallas.gpu.hopper import arrays, clusters, tile_scheduler
from ejkernel_pallas.gpu.hopper.arrays import broadcast_to_rows
from ejkernel_pallas.gpu.hopper.ping_pong import ping_pong_pass, ping_pong_wait
from ejkernel_pallas.gpu.hopper.powers_of_two import exp2_of_scores
from ejkernel_pallas.gpu.hopper.sizes import I32, WGMMA_M
from ejkernel_pallas.gpu.tiled_attention.config import BACKWARD_CONSUMER_WARPGROUPS, BackwardTile
from ejkernel_pallas.gpu.tiled_attention.kernels import dropout
from ejkernel_pallas.gpu.tiled_attention.kernels.backward_call import (
    Call,
    MaskInputs,
    QueryBlockRuns,
    ScoreFunctions,
    dq_full_barrier,
    for_each_query_block,
    key_slice,
    load_pattern_words,
    make_pair_tile,
    query_dropout_keys,
    store_split_gradient,
    wait_for_tiles_and_zero_padding,
    zero_padding,
)
from ejkernel_pallas.gpu.tiled_attention.kernels.backward_copies import add_dq_pieces, copy_operands_to_shared
from ejkernel_pallas.gpu.tiled_attention.kernels.flash_backward_wide import run_wide_consumer


def backward_kernel(call: Call) -> None:
    """Runs one thread block of the kernel: gradients of keys and values, and unscaled gradients of queries."""
    warpgroup, tile = lax.axis_index("warpgroup"), call.tile
    number = _wait_for_tile_index(call, warpgroup)
    item = tile_scheduler.locate_work_tile(call.schedule, number)
    runs = tile_scheduler.block_bounds(call.schedule, call.operands["table"], number)
    query_runs = QueryBlockRuns(item, item.head * call.spec.group_size, runs)
    for_each_block = functools.partial(for_each_query_block, call, query_runs)

    @pl.when(warpgroup < BACKWARD_CONSUMER_WARPGROUPS)
    def _consume() -> None:
        # The producer warpgroup, which only copies, gives up registers for the consumers.
        plgpu.set_max_registers(tile.consumer_registers, action="increase")
        (run_wide_consumer if tile.has_wide_heads else run_consumer)(call, item, warpgroup, for_each_block)

    @pl.when(warpgroup == BACKWARD_CONSUMER_WARPGROUPS)
    def _run_producer() -> None:
        plgpu.set_max_registers(tile.producer_registers, action="decrease")

        # Copies to shared memory and additions to dq have separate warps, so that waiting to add does not delay copies.
        @plgpu.warp_map
        def _(warp: Any) -> None:
            pl.when(warp == 0)(functools.partial(copy_operands_to_shared, call, item, for_each_block))
            pl.when((warp > 0) & (warp <= tile.num_dq_adder_warps))(
                functools.partial(add_dq_pieces, call, item, for_each_block, warp - 1)
            )

    if tile.has_wide_heads:
        clusters.wait_for_cluster()


def _wait_for_tile_index(call: Call, warpgroup: Any) -> Any:
    """Returns the index of the block's key tile: the number of blocks that started earlier, the only ones it may
    wait for.
    """
    if call.tile.has_wide_heads:
        clusters.start_cluster_tile(call.tile_counter, call.buffers["pair"])
        return call.buffers["pair"][0]
    number, full = call.buffers["number"], call.buffers["number_full"]

    @pl.when(warpgroup == BACKWARD_CONSUMER_WARPGROUPS)
    def _fetch_tile_index() -> None:
        tile_scheduler.fetch_and_store_tile_index(call.schedule, call.tile_counter, number.at[0])
        plgpu.barrier_arrive(full)

    plgpu.barrier_wait(full)
    # `fetch_and_store_tile_index` counts after the blocks' first tiles; here the counter alone assigns tiles. A block's
    # index would not do, since blocks need not start in index order.
    return number[0] - call.schedule.num_blocks


def run_consumer(call: Call, item: tile_scheduler.WorkTile, warpgroup: Any, for_each_block: Any) -> None:
    # The main loop of a consumer warpgroup: dk and dv of its 64 keys, and one half of the block's part of dq.
    spec, tile, buffers = call.spec, call.tile, call.buffers
    plgpu.barrier_arrive(buffers["ds_full"])  # so that the first step waits for no ds
    # Warpgroup 0 issues products first; its predecessor is the last warpgroup.
    pl.when(warpgroup == BACKWARD_CONSUMER_WARPGROUPS - 1)(
        functools.partial(ping_pong_pass, BACKWARD_CONSUMER_WARPGROUPS)
    )
    plgpu.barrier_wait(buffers["kv_full"])
    if spec.has_segments:
        key_rows = [
            (buffers["k"].at[part * BACKWARD_CONSUMER_WARPGROUPS + warpgroup], tile.array_swizzle_bytes("k"))
            for part in range(tile.key_chunks_per_row)
        ]
        zero_padding(
            _key_segment_ids(call, item, warpgroup),
            (buffers["v"].at[warpgroup], tile.array_swizzle_bytes("v")),
            *key_rows,
        )

    def process_query_block(has_masked_pairs: bool, head: Any, list_index: Any, state: Any) -> Any:
        count, dk, dv, ds = state
        index = call.query_block_index(item, head, list_index)
        # Addresses in shared memory are recomputed in every step: hoisted out of the loop, they would take registers.
        warpgroup_index = lax.optimization_barrier(warpgroup)
        slot, last = (lax.rem(n, I32(tile.stages_by_operand["q"])) for n in (count, jnp.maximum(count - 1, 0)))
        wait_for_tiles_and_zero_padding(call, count, has_masked_pairs)
        key = item.tile_in_head * tile.block_kv + warpgroup_index * WGMMA_M
        row_ids = (
            arrays.load_row_vector(_key_segment_ids(call, item, warpgroup_index))
            if has_masked_pairs and spec.has_segments
            else None
        )
        words = load_pattern_words(call, item, head, list_index, warpgroup_index) if has_masked_pairs else ()
        # Full blocks have a separate loop without comparisons.
        functions = ScoreFunctions(
            call,
            make_pair_tile(call, item, head, key, index),
            MaskInputs(key, row_ids, slot, index, words) if has_masked_pairs else None,
        )
        dropout_keys = functools.partial(_load_dropout_keys, call, item, warpgroup_index, slot, head, index)
        ds = _previous_ds(call, warpgroup_index, count) if tile.is_register_bound else ds
        dk, *weights = _compute_weights(call, warpgroup_index, slot, last, dk, ds, functions, dropout_keys)
        if spec.has_dropout:
            ds = weights.pop()
        else:
            ds = broadcast_to_rows(arrays.load_column_vector(buffers["delta"].at[slot]), (WGMMA_M, tile.block_q))
        # dk's product, the last one to read the previous step's queries, ended with `_compute_weights`.
        pl.when(count > 0)(lambda: plgpu.barrier_arrive(buffers["q_free"].at[last]))
        dv, dq, ds = _compute_ds(call, warpgroup_index, count, dv, ds, *weights)
        # dv's product, the last one to read this step's do, ended with `_compute_ds`.
        plgpu.barrier_arrive(buffers["do_free"].at[lax.rem(count, I32(tile.stages_by_operand["do"]))])
        if tile.is_register_bound:
            dq, ds = _compute_previous_dq(call, warpgroup_index, count, ds), None
        else:
            _store_ds(call, warpgroup_index, count, ds)
        # Its commit covers ds as well: one fence for both.
        _pass_dq_to_adder(call, warpgroup_index, count, dq)
        plgpu.barrier_arrive(buffers["ds_full"])
        return count + 1, dk, dv, ds

    zeros = {size: arrays.zero_tile((WGMMA_M, size)) for size in {spec.head_dim, spec.value_dim}}
    begin = I32(0), zeros[spec.head_dim], zeros[spec.value_dim], _initial_ds(call, warpgroup)
    count, dk, dv, ds = for_each_block(process_query_block, begin, tile.needs_masks(spec))
    # No product reads the values any more, so dv overwrites them while dk waits for its last term.
    _write_dv(call, item, warpgroup, dv * spec.dropout_scale)
    last = lax.rem(count - 1, I32(tile.stages_by_operand["q"]))
    dk = _finish_dk(
        call, warpgroup, count, last, dk, _previous_ds(call, warpgroup, count) if tile.is_register_bound else ds
    )
    _write_gradients(call, item, warpgroup, dk * (spec.scale * spec.dropout_scale))


def _key_segment_ids(call: Call, item: tile_scheduler.WorkTile, warpgroup: Any) -> Any:
    """Returns segment ids of a warpgroup's keys."""
    return (
        key_slice(call, "k_ids", item, warpgroup)
        if call.tile.is_register_bound
        else call.buffers["k_ids"].at[warpgroup]
    )


def _load_dropout_keys(
    call: Call, item: tile_scheduler.WorkTile, warpgroup: Any, slot: Any, head: Any, query_block_index: Any
) -> tuple[Any, Any]:
    """Returns dropout's keys of a warpgroup's keys and of a step's queries."""
    if call.tile.is_register_bound:
        return arrays.load_row_vector(key_slice(call, "k_dropout_keys", item, warpgroup)), query_dropout_keys(
            call, item, head, query_block_index
        )
    rows, columns = call.buffers["k_dropout_keys"].at[warpgroup], call.buffers["q_dropout_keys"].at[slot]
    return arrays.load_row_vector(rows), arrays.load_column_vector(columns)


def _write_dv(call: Call, item: tile_scheduler.WorkTile, warpgroup: Any, dv: Any) -> None:
    """Stores a tile's dv in the memory of the values, or writes dv of a part."""

    def store_dv() -> None:
        call.buffers["v"].at[warpgroup][...] = dv.astype(call.spec.dtype)

    tile_scheduler.run_whole_or_split_tile(
        call.schedule, item, store_dv, functools.partial(store_split_gradient, call, item, "v", warpgroup * WGMMA_M, dv)
    )


def _write_gradients(call: Call, item: tile_scheduler.WorkTile, warpgroup: Any, dk: Any) -> None:
    """Writes both gradients of a tile, once no product reads the keys any more, or dk of a part."""
    # The dq of either warpgroup reads the keys of both.
    plgpu.barrier_arrive(call.buffers["dq_done"])
    plgpu.barrier_wait(call.buffers["dq_done"])
    whole = functools.partial(_write_whole_tile, call, item, warpgroup, dk)
    tile_scheduler.run_whole_or_split_tile(
        call.schedule, item, whole, functools.partial(store_split_gradient, call, item, "k", warpgroup * WGMMA_M, dk)
    )


def _write_whole_tile(call: Call, item: tile_scheduler.WorkTile, warpgroup: Any, dk: Any) -> None:
    """Writes both gradients; dk goes through the memory of the keys."""
    tile, buffers = call.tile, call.buffers
    for part in range(tile.key_chunks_per_row):
        columns = dk[:, part * tile.key_chunk_columns : (part + 1) * tile.key_chunk_columns]
        buffers["k"].at[part * BACKWARD_CONSUMER_WARPGROUPS + warpgroup][...] = columns.astype(call.spec.dtype)
    plgpu.commit_smem()
    # Bulk copies skip rows past the end, so a partial tile needs no mask.
    rows = pl.ds(item.tile_in_head * tile.block_kv + warpgroup * WGMMA_M, WGMMA_M)
    for part in range(tile.key_chunks_per_row):
        target = call.outputs[0].at[
            item.batch_row, rows, item.head, pl.ds(part * tile.key_chunk_columns, tile.key_chunk_columns)
        ]
        plgpu.copy_smem_to_gmem(buffers["k"].at[part * BACKWARD_CONSUMER_WARPGROUPS + warpgroup], target)
    plgpu.copy_smem_to_gmem(buffers["v"].at[warpgroup], call.outputs[1].at[item.batch_row, rows, item.head])
    plgpu.wait_smem_to_gmem(0)


def _compute_weights(
    call: Call,
    warpgroup: Any,
    slot: Any,
    previous_slot: Any,
    dk: Any,
    ds: Any,
    functions: ScoreFunctions,
    load_dropout_keys: Callable[[], tuple[Any, Any]],
) -> tuple[Any, ...]:
    """Returns dk with the previous step's term, and this step's weights, which are computed during dk's product.

    With a soft cap or a `score_mod` also the weights times its slope, in 16 bits like the weights: in float32, or as
    the slope alone, they would not fit the registers. With dropout also the initial sums of the gradients of weights.
    """
    spec, tile, buffers = call.spec, call.tile, call.buffers
    shape = (WGMMA_M, tile.block_q)
    has_masked_pairs = functions.mask is not None

    def issue_products(refs: Any) -> None:
        dk_ref, scores_ref, *weight_refs = refs
        if not spec.has_segments:
            plgpu.barrier_wait(buffers["q_full"].at[slot])
        if tile.uses_ping_pong_for_scores:
            ping_pong_wait(BACKWARD_CONSUMER_WARPGROUPS)
        for part in range(tile.key_chunks_per_row):
            queries = buffers["q"].at[slot, :, pl.ds(part * tile.key_chunk_columns, tile.key_chunk_columns)]
            plgpu.wgmma(
                scores_ref, buffers["k"].at[part * BACKWARD_CONSUMER_WARPGROUPS + warpgroup], queries.transpose((1, 0))
            )
        # Issued after the scores, so that it runs during the exponentials.
        plgpu.wgmma(dk_ref, ds, buffers["q"].at[previous_slot])
        if tile.uses_ping_pong_for_scores:
            ping_pong_pass(BACKWARD_CONSUMER_WARPGROUPS)
        # Waits only for the scores: dk's product stays in flight.
        scores = plgpu.wgmma_accumulator_load(scores_ref, wait_n=1)
        scores, unmodified_scores = functions.modify_and_mask(scores)
        shift = broadcast_to_rows(arrays.load_column_vector(buffers["shift"].at[slot]), shape)
        # tanh and exp2 share the special-function unit, so half of the exponentials use the FMA units. Not with masks:
        # polynomials do not give 0 for a masked score.
        if spec.soft_cap is not None and spec.score_mod is None and not has_masked_pairs:
            weights = exp2_of_scores(scores, spec.softmax_scale_log2, shift)
        else:
            weights = jnp.exp2(scores * spec.softmax_scale_log2 - shift)
        zeros = (
            _drop_weights(
                call,
                slot,
                load_dropout_keys,
                has_masked_pairs,
                *functions.weights_and_slopes(weights, unmodified_scores),
            )
            if spec.has_dropout
            else functions.weights_and_slopes(weights, unmodified_scores)
        )
        for ref, value in zip(weight_refs, zeros, strict=True):
            # Converted to 16 bits at once: dk's product is still using its registers.
            ref[...] = value.astype(ref.dtype)

    initial_refs, zeros = plgpu.WGMMAAccumulatorRef.init, arrays.zero_tile(shape)
    outputs = [zeros.astype(spec.dtype)] * (1 + spec.has_slope) + [zeros] * spec.has_dropout
    dk, _, *weights = pl.run_state(issue_products)((initial_refs(dk), initial_refs(zeros), *outputs))
    return dk, *weights


def _drop_weights(
    call: Call,
    slot: Any,
    load_dropout_keys: Callable[[], tuple[Any, Any]],
    has_masked_pairs: bool,
    *weights_and_slope: Any,
) -> list[Any]:
    """Returns the outputs of `_compute_weights` with dropout: a step's weights, and those times the cap's slope if
    there is a cap.

    A dropped weight p adds nothing to dv, but the gradient of its score is -p delta, and there are too few registers
    for p in addition to the zero. So the gradients of weights start there from -p delta / tiny instead of -delta, and
    their factor is tiny instead of p: the term of <do, v> vanishes, and so does the weight in dv.

    If pairs are masked, rows of other segments may hold any number: p times delta comes first, as 0 times an infinite
    delta / tiny is NaN, and the factor is at most p, which is 0 for a masked pair.
    """
    spec, buffers, (rows, columns) = call.spec, call.buffers, load_dropout_keys()
    delta, *weights, factors = arrays.load_column_vector(buffers["delta"].at[slot]), *weights_and_slope
    shape, dropped_weight = factors.shape, dropout.DROPPED_WEIGHT[spec.dtype.name]
    if has_masked_pairs:
        dropped_gradients = factors * broadcast_to_rows(delta, shape) * (1 / dropped_weight)
        dropped_weight = jnp.minimum(factors, dropped_weight)
    else:
        dropped_gradients = factors * broadcast_to_rows(delta * (1 / dropped_weight), shape)
    initial_gradients = broadcast_to_rows(delta, shape), dropped_gradients
    return dropout.select_by_dropout(
        spec, rows, columns, *((x, 0.0) for x in weights), (factors, dropped_weight), initial_gradients
    )


def _compute_ds(
    call: Call, warpgroup: Any, steps_done: Any, dv: Any, ds: Any, weights: Any, capped_scores: Any = None
) -> tuple[Any, Any, Any]:
    """Returns dv with this step's term, the previous step's part of dq, and the gradients of this step's scores.

    Gradients of weights start from `ds`, which is -delta. For a register-bound tile dq is None: `_compute_previous_dq`
    computes it in the registers of the gradients of weights.
    """
    spec, tile, buffers = call.spec, call.tile, call.buffers
    shape, slot = (WGMMA_M, tile.block_q), lax.rem(steps_done, I32(tile.stages_by_operand["do"]))
    one = 1 + lax.shift_right_logical(warpgroup, I32(8))
    weights = _copy_to_new_registers(weights, one)
    ds = _copy_to_new_registers(ds, one) if spec.has_dropout else ds

    def issue_products(refs: Any) -> None:
        dv_ref, dweights_ref, *dq_accumulator_refs, ds_ref = refs
        if not spec.has_segments:
            plgpu.barrier_wait(buffers["do_full"].at[slot])
        # Only issuing is exclusive; the products run on while the other warpgroup issues its own.
        ping_pong_wait(BACKWARD_CONSUMER_WARPGROUPS)
        plgpu.wgmma(dweights_ref, buffers["v"].at[warpgroup], buffers["do"].at[slot].transpose((1, 0)))
        plgpu.wgmma(dv_ref, weights, buffers["do"].at[slot])
        for dq_accumulator_ref in dq_accumulator_refs:
            _issue_dq_products(call, warpgroup, steps_done, dq_accumulator_ref)
        ping_pong_pass(BACKWARD_CONSUMER_WARPGROUPS)
        # Products issued after that of the gradients of weights: dv's, and dq's with the keys of each warpgroup.
        num_dv_refs = 1 + BACKWARD_CONSUMER_WARPGROUPS * len(dq_accumulator_refs)
        factors = arrays.widen_to_float32(weights if capped_scores is None else capped_scores)
        ds_ref[...] = (factors * plgpu.wgmma_accumulator_load(dweights_ref, wait_n=num_dv_refs)).astype(spec.dtype)

    initial_refs = plgpu.WGMMAAccumulatorRef.init
    initial_ds = arrays.zero_tile(shape).astype(spec.dtype)
    dq_accumulators = [] if tile.is_register_bound else [initial_refs(_zero_dq_tile(tile))]
    dv, _, *dq, ds = pl.run_state(issue_products)((initial_refs(dv), initial_refs(ds), *dq_accumulators, initial_ds))
    return dv, dq[0] if dq else None, _copy_to_new_registers(ds, one)


def _initial_ds(call: Call, warpgroup: Any) -> Any:
    """Returns the gradients of scores before the first step: zeros, in shared memory for register-bound tiles."""
    zeros = arrays.zero_tile((WGMMA_M, call.tile.block_q)).astype(call.spec.dtype)
    if not call.tile.is_register_bound:
        return zeros
    _previous_ds(call, warpgroup, I32(0))[...] = zeros
    plgpu.commit_smem()
    return None


def _store_ds(call: Call, warpgroup: Any, steps_done: Any, ds: Any) -> None:
    """Stores a step's gradients of a warpgroup's scores in shared memory."""
    for query_half in range(call.tile.block_q // WGMMA_M):
        part = ds[:, query_half * WGMMA_M : (query_half + 1) * WGMMA_M]
        call.buffers["ds"].at[_ds_buffer_index(call.tile, steps_done, warpgroup, query_half)][...] = part


def _previous_ds(call: Call, warpgroup: Any, steps_done: Any) -> Any:
    """Returns the previous step's gradients of a warpgroup's scores in shared memory."""
    return call.buffers["ds"].at[_ds_buffer_index(call.tile, steps_done + 1, warpgroup, 0)]


def _compute_previous_dq(call: Call, warpgroup: Any, steps_done: Any, ds: Any) -> Any:
    """Returns the previous step's part of dq, computed separately while the other warpgroup's products run.

    First the step's gradients of scores are stored. They overwrite those of the step before the previous one, which the
    other warpgroup has read when it arrives at `ds_full` after its last part of dq.
    """
    plgpu.barrier_wait(call.buffers["ds_full"])
    _store_ds(call, warpgroup, steps_done, ds)
    plgpu.commit_smem()
    product = functools.partial(_issue_dq_products, call, warpgroup, steps_done)
    return pl.run_state(product)(plgpu.WGMMAAccumulatorRef.init(_zero_dq_tile(call.tile)))


def _copy_to_new_registers(tile: Any, opaque_one: Any) -> Any:
    """Returns a tile in new registers, written after earlier code: times a one that the compiler cannot fold.

    Conversions to 16 bits run during products, since that halves the registers; but they must not write registers that
    a product in flight reads.
    """
    return lax.optimization_barrier(lax.optimization_barrier(tile) * opaque_one.astype(tile.dtype))


def _finish_dk(call: Call, warpgroup: Any, steps_done: Any, previous_slot: Any, dk: Any, ds: Any) -> Any:
    """Returns dk with the previous step's term, and hands over the previous step's part of dq."""

    def issue_products(refs: Any) -> None:
        dk_ref, dq_accumulator_ref = refs
        plgpu.wgmma(dk_ref, ds, call.buffers["q"].at[previous_slot])
        if call.tile.is_register_bound:
            plgpu.barrier_wait(call.buffers["ds_full"])
        _issue_dq_products(call, warpgroup, steps_done, dq_accumulator_ref)

    initial_refs = plgpu.WGMMAAccumulatorRef.init
    dk, dq = pl.run_state(issue_products)((initial_refs(dk), initial_refs(_zero_dq_tile(call.tile))))
    _pass_dq_to_adder(call, warpgroup, steps_done, dq)
    return dk


def _zero_dq_tile(tile: BackwardTile) -> Any:
    return arrays.zero_tile((WGMMA_M, tile.dq_strip_columns))


def _issue_dq_products(call: Call, warpgroup: Any, steps_done: Any, dq_accumulator: Any) -> None:
    """Issues the products of the previous step's part of dq."""
    tile, buffers = call.tile, call.buffers
    if not tile.is_register_bound:
        plgpu.barrier_wait(buffers["ds_full"])
    query_half, part = tile.dq_row_and_column_half(warpgroup)
    for other in range(BACKWARD_CONSUMER_WARPGROUPS):
        # ds is stored keys by queries, and dq = ds K needs queries by keys: the descriptor transposes, without moving
        # data.
        left = buffers["ds"].at[_ds_buffer_index(tile, steps_done + 1, other, query_half)]
        plgpu.wgmma(
            dq_accumulator, left.transpose((1, 0)), buffers["k"].at[part * BACKWARD_CONSUMER_WARPGROUPS + other]
        )


def _pass_dq_to_adder(call: Call, warpgroup: Any, steps_done: Any, dq: Any) -> None:
    """Passes the previous step's part of dq to the adder warps; its commit covers earlier stores to shared memory."""
    buffers = call.buffers
    # Step 0 has no previous step: what it stores is not handed over, so step 1 finds the buffer free too.
    pl.when(steps_done > 1)(lambda: plgpu.barrier_wait(buffers["dq_free"].at[0]))
    buffers["dq"].at[warpgroup][...] = dq
    plgpu.commit_smem()
    pl.when(steps_done > 0)(lambda: plgpu.barrier_arrive(dq_full_barrier(call, steps_done - 1, 0)))


def _ds_buffer_index(tile: BackwardTile, steps_done: Any, warpgroup: Any, query_half: Any) -> Any:
    """Returns the index of a warpgroup's gradients of scores for 64 queries."""
    # Double-buffered: dq's product reads the previous step's while this step's is written.
    return (lax.rem(steps_done, I32(2)) * BACKWARD_CONSUMER_WARPGROUPS + warpgroup) * (
        tile.block_q // WGMMA_M
    ) + query_half
