"""The backward kernel's consumer warpgroups for large heads, where one warpgroup's registers hold only one gradient.

    warpgroup 0   S^T(t) | exp2, mask ─► P^T ─► smem     | dv(t), dq(t-1) left  | dq ─► smem
    warpgroup 1   dk(t-1) | dP^T(t) | ds = P^T (dP - delta) ─► smem, other block | dq(t-1) right | dq ─► smem

A block has 64 keys, and the two blocks of a cluster have 128 consecutive ones. The first warpgroup computes scores and
weights and accumulates dv; the second computes ds from the weights, which it gets through shared memory and overwrites
there, and accumulates dk. Both blocks loop over the same query blocks; each copies one half for both by multicast. They
exchange ds through distributed shared memory, and each computes one half of the columns of the cluster's dq: HBM takes
half as many additions as if each block added for its 64 keys.

A warpgroup computes a quarter of the previous step's part of dq, and hands it over in two strips, half a step apart:
shared memory has room for one strip per warpgroup.
"""

import functools
from typing import Any

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from ejkernel_pallas.gpu.hopper import arrays, clusters, tile_scheduler
from ejkernel_pallas.gpu.hopper.arrays import broadcast_to_rows
from ejkernel_pallas.gpu.hopper.sizes import I32, SWIZZLE_COLUMNS, WGMMA_M
from ejkernel_pallas.gpu.tiled_attention.kernels import dropout, pair_functions
from ejkernel_pallas.gpu.tiled_attention.kernels.backward_call import (
    Call,
    MaskInputs,
    ScoreFunctions,
    dq_full_barrier,
    key_slice,
    load_pattern_words,
    make_pair_tile,
    query_dropout_keys,
    store_split_gradient,
    wait_for_tiles_and_zero_padding,
    zero_padding,
)

MAKE_ACCUMULATOR_REF = plgpu.WGMMAAccumulatorRef.init


def run_wide_consumer(call: Call, item: tile_scheduler.WorkTile, warpgroup: Any, for_each_block: Any) -> None:
    """Runs the main loops of the two consumer warpgroups."""
    plgpu.barrier_wait(call.buffers["kv_full"])
    pl.when(warpgroup == 0)(functools.partial(_accumulate_dv, call, item, for_each_block))
    pl.when(warpgroup == 1)(functools.partial(_accumulate_dk, call, item, for_each_block))


def _accumulate_dv(call: Call, item: tile_scheduler.WorkTile, for_each_block: Any) -> None:
    spec, tile, buffers = call.spec, call.tile, call.buffers
    first, row_ids = _first_key(call, item, call.cluster_member), None
    row_dropout_keys = (
        arrays.load_row_vector(key_slice(call, "k_dropout_keys", item, call.cluster_member))
        if spec.has_dropout
        else None
    )
    if spec.has_segments:
        ids, peer_ids = (
            key_slice(call, "k_ids", item, member) for member in (call.cluster_member, 1 - call.cluster_member)
        )
        row_ids = arrays.load_row_vector(ids)
        line = tile.array_swizzle_bytes("k")
        zero_padding(ids, *((buffers["k"].at[part], line) for part in range(tile.key_chunks_per_row)))
        zero_padding(
            peer_ids,
            *((buffers["k"].at[tile.key_chunks_per_row + part], line) for part in range(tile.num_peer_key_chunks)),
        )

    def step(has_masked_pairs: bool, head: Any, list_index: Any, state: Any) -> Any:
        (count, dv, pending_dq_strip), index = state, call.query_block_index(item, head, list_index)
        slot, half = lax.rem(count, I32(tile.query_stages)), lax.rem(count, I32(2))
        wait_for_tiles_and_zero_padding(call, count, has_masked_pairs)
        words = load_pattern_words(call, item, head, list_index, call.cluster_member) if has_masked_pairs else ()
        functions = ScoreFunctions(
            call,
            make_pair_tile(call, item, head, first, index),
            MaskInputs(first, row_ids, slot, index, words) if has_masked_pairs else None,
        )
        dropout_keys = (row_dropout_keys, query_dropout_keys(call, item, head, index)) if spec.has_dropout else None
        weights, factors = _compute_weights(call, count, slot, pending_dq_strip, functions, dropout_keys)
        # Both members have computed their parts of dq from the previous contents.
        pl.when(count > 1)(lambda: plgpu.barrier_wait(buffers["ds_free"].at[half]))
        buffers["ds"].at[half][...] = factors.astype(spec.dtype)
        plgpu.commit_smem()
        # Warpgroup 1 replaces them by gradients of scores.
        plgpu.barrier_arrive(buffers["weights_full"])
        # The scores' product has ended; warpgroup 1's product for dk reads the same queries, and it arrives itself.
        plgpu.barrier_arrive(buffers["q_free"].at[slot])
        # Converted to 16 bits before a product is issued: no register of an operand may be written while one is in
        # flight.
        weights = lax.optimization_barrier(weights.astype(spec.dtype))

        def issue_products(refs: Any) -> None:
            dv_ref, dq_accumulator_ref, pending_dq_strip_ref = refs
            # dq first, so that waiting for all but one product gives dq while dv's product runs.
            _issue_dq_products(call, count - 1, 0, dq_accumulator_ref)
            if not spec.has_segments:
                plgpu.barrier_wait(buffers["do_full"].at[0])
            plgpu.wgmma(dv_ref, weights, buffers["do"].at[_opaque_zero()])
            pending_dq_strip_ref[...] = _pass_first_dq_strip(
                call, count - 1, 0, plgpu.wgmma_accumulator_load(dq_accumulator_ref, wait_n=1)
            )

        dv, _, pending_dq_strip = pl.run_state(issue_products)(
            (MAKE_ACCUMULATOR_REF(dv), MAKE_ACCUMULATOR_REF(_zero_dq_tile()), pending_dq_strip)
        )
        plgpu.barrier_arrive(buffers["do_free"].at[0])
        return count + 1, dv, pending_dq_strip

    start = I32(0), arrays.zero_tile((WGMMA_M, spec.value_dim)), _zero_dq_strip(call)
    count, dv, pending_dq_strip = for_each_block(step, start, tile.needs_masks(spec))
    # The pipeline drains: the last strip of the step before the last, then all of the last step.
    _pass_dq_to_adders(call, count - 2, 0, 1, pending_dq_strip)
    _compute_and_pass_dq(call, count - 1, 0)
    # This warpgroup does not read the keys any more; the other waits for that before it overwrites them with dk.
    plgpu.barrier_arrive(buffers["dq_done"])
    dv = dv * spec.dropout_scale
    part = functools.partial(store_split_gradient, call, item, "v", call.cluster_member * WGMMA_M, dv)
    tile_scheduler.run_whole_or_split_tile(call.schedule, item, functools.partial(_write_dv, call, item, dv), part)


def _write_dv(call: Call, item: tile_scheduler.WorkTile, dv: Any) -> None:
    """Writes dv through the memory of the values."""
    place = call.buffers["v"].at[0]
    place[...] = dv.astype(call.spec.dtype)
    plgpu.commit_smem()
    rows = pl.ds(_first_key(call, item, call.cluster_member), WGMMA_M)
    plgpu.copy_smem_to_gmem(place, call.outputs[1].at[item.batch_row, rows, item.head])
    plgpu.wait_smem_to_gmem(0)


def _first_key(call: Call, item: tile_scheduler.WorkTile, cluster_member: Any) -> Any:
    return item.tile_in_head * call.tile.block_kv + cluster_member * WGMMA_M


def _compute_weights(
    call: Call, steps_done: Any, slot: Any, pending_dq_strip: Any, functions: ScoreFunctions, dropout_keys: Any
) -> tuple[Any, Any]:
    """Returns a step's weights, and the factors of the gradients of weights: negative where dropout drops a weight."""
    spec, buffers, shape = call.spec, call.buffers, (WGMMA_M, call.tile.block_q)

    def issue_product(scores_ref: Any) -> None:
        if not spec.has_segments:
            plgpu.barrier_wait(buffers["q_full"].at[slot])
        for part in range(call.tile.key_chunks_per_row):
            queries = buffers["q"].at[slot, :, pl.ds(part * SWIZZLE_COLUMNS, SWIZZLE_COLUMNS)]
            plgpu.wgmma(scores_ref, buffers["k"].at[_opaque_zero() + part], queries.transpose((1, 0)))
        # During the scores' product: by now the adder has taken the first strip.
        _pass_dq_to_adders(call, steps_done - 2, 0, 1, pending_dq_strip)

    scores: Any = pl.run_state(issue_product)(MAKE_ACCUMULATOR_REF(arrays.zero_tile(shape)))
    cap_slope = None
    if spec.soft_cap is not None:
        scores = jnp.tanh(scores * spec.product_scale)
        cap_slope = 1 - scores * scores
    unmodified_scores = scores
    if functions.pairs is not None:
        scores = pair_functions.modify_scores(spec, scores, functions.pairs)
    scores = functions.mask_scores(scores)
    weights = jnp.exp2(
        scores * spec.softmax_scale_log2
        - broadcast_to_rows(arrays.load_column_vector(buffers["shift"].at[slot]), shape)
    )
    factors = weights if cap_slope is None else weights * cap_slope
    if functions.pairs is not None and spec.has_score_slope:
        factors = pair_functions.multiply_by_slope(spec, factors, unmodified_scores, functions.pairs)
    if dropout_keys is not None:
        weights, factors = dropout.select_by_dropout(spec, *dropout_keys, (weights, 0.0), (factors, -factors))
    return weights, factors


def _issue_dq_products(call: Call, steps_done: Any, warpgroup: int, dq_accumulator: Any) -> None:
    """Issues the products of a warpgroup's part of a step's dq, once both members' gradients have arrived."""
    tile, buffers = call.tile, call.buffers
    # Before the first step the product reads uninitialised memory, and is not handed over: this saves a branch around
    # the step.
    pl.when(steps_done >= 0)(functools.partial(clusters.wait_for_score_gradients, buffers["pair"], steps_done))
    place, part = lax.rem(steps_done + 2, I32(2)), call.cluster_member * tile.num_peer_key_chunks + warpgroup
    # dq contracts over the keys of both members: over this one's gradients of scores, and over those that the other one
    # sent.
    for source, keys in ((place, part), (place + 2, I32(tile.key_chunks_per_row + warpgroup))):
        keys = buffers["k"].at[_opaque_zero() + keys]
        plgpu.wgmma(dq_accumulator, buffers["ds"].at[source].transpose((1, 0)), keys)


def _opaque_zero() -> Any:
    """Returns zero as an opaque offset: addresses in shared memory that the compiler can hoist would take registers."""
    return lax.optimization_barrier(I32(0))


def _zero_dq_tile() -> Any:
    return arrays.zero_tile((WGMMA_M, SWIZZLE_COLUMNS))


def _zero_dq_strip(call: Call) -> Any:
    return arrays.zero_tile((WGMMA_M, call.tile.dq_strip_columns))


def _pass_dq_to_adders(call: Call, steps_done: Any, warpgroup: int, strip_index: int, dq: Any) -> None:
    """Passes a strip of a step's part of dq to an adder warp; before the first step nothing is added."""
    buffers = call.buffers
    # The first strip of step 0 finds the buffer free.
    pl.when(steps_done > -strip_index)(lambda: plgpu.barrier_wait(buffers["dq_free"].at[warpgroup]))
    buffers["dq"].at[warpgroup][...] = dq
    plgpu.commit_smem()
    pl.when(steps_done >= 0)(lambda: plgpu.barrier_arrive(dq_full_barrier(call, steps_done, warpgroup)))


def _pass_first_dq_strip(call: Call, steps_done: Any, warpgroup: int, dq: Any) -> Any:
    """Hands over the first strip of a step's part of dq, once gradients of scores have been read; returns the
    second.
    """
    pl.when(steps_done >= 0)(lambda: plgpu.barrier_arrive(call.buffers["ds_free"].at[lax.rem(steps_done, I32(2))]))
    _pass_dq_to_adders(call, steps_done, warpgroup, 0, dq[:, : call.tile.dq_strip_columns])
    # Copied to new registers: the accumulator's are read only after all products issued so far.
    return dq[:, call.tile.dq_strip_columns :] * (1 + _opaque_zero()).astype(jnp.float32)


def _compute_and_pass_dq(call: Call, steps_done: Any, warpgroup: int) -> None:
    """Computes the previous step's part of dq, and hands it over."""
    dq: Any = pl.run_state(functools.partial(_issue_dq_products, call, steps_done, warpgroup))(
        MAKE_ACCUMULATOR_REF(_zero_dq_tile())
    )
    _pass_dq_to_adders(call, steps_done, warpgroup, 1, _pass_first_dq_strip(call, steps_done, warpgroup, dq))


def _accumulate_dk(call: Call, item: tile_scheduler.WorkTile, for_each_block: Any) -> None:
    spec, tile, buffers = call.spec, call.tile, call.buffers
    if spec.has_segments:
        zero_padding(
            key_slice(call, "k_ids", item, call.cluster_member), (buffers["v"].at[0], tile.array_swizzle_bytes("v"))
        )

    def step(has_masked_pairs: bool, _head: Any, _list_index: Any, state: Any) -> Any:
        count, dk, ds, pending_dq_strip = state
        wait_for_tiles_and_zero_padding(call, count, has_masked_pairs)
        dk, ds, pending_dq_strip = _compute_ds(call, count, dk, ds, pending_dq_strip)
        return count + 1, dk, ds, pending_dq_strip

    zeros = arrays.zero_tile((WGMMA_M, tile.block_q)).astype(spec.dtype)
    start = I32(0), arrays.zero_tile((WGMMA_M, spec.head_dim)), zeros, _zero_dq_strip(call)
    count, dk, ds, pending_dq_strip = for_each_block(step, start, spec.has_segments)
    _pass_dq_to_adders(call, count - 2, 1, 1, pending_dq_strip)
    _compute_and_pass_dq(call, count - 1, 1)
    last = buffers["q"].at[lax.rem(count - 1, I32(tile.query_stages))]
    dk: Any = pl.run_state(lambda dk_ref: plgpu.wgmma(dk_ref, ds, last))(MAKE_ACCUMULATOR_REF(dk))
    plgpu.barrier_wait(buffers["dq_done"])
    dk = dk * (spec.scale * spec.dropout_scale)
    part = functools.partial(store_split_gradient, call, item, "k", call.cluster_member * WGMMA_M, dk)
    tile_scheduler.run_whole_or_split_tile(call.schedule, item, functools.partial(_write_dk, call, item, dk), part)


def _write_dk(call: Call, item: tile_scheduler.WorkTile, dk: Any) -> None:
    """Writes dk through the memory of the keys."""
    places, rows = call.buffers["k"], pl.ds(_first_key(call, item, call.cluster_member), WGMMA_M)
    for part in range(call.tile.key_chunks_per_row):
        places.at[part][...] = dk[:, part * SWIZZLE_COLUMNS : (part + 1) * SWIZZLE_COLUMNS].astype(call.spec.dtype)
    plgpu.commit_smem()
    for part in range(call.tile.key_chunks_per_row):
        columns = pl.ds(part * SWIZZLE_COLUMNS, SWIZZLE_COLUMNS)
        plgpu.copy_smem_to_gmem(places.at[part], call.outputs[0].at[item.batch_row, rows, item.head, columns])
    plgpu.wait_smem_to_gmem(0)


def _compute_ds(call: Call, steps_done: Any, dk: Any, ds: Any, pending_dq_strip: Any) -> tuple[Any, Any, Any]:
    """Returns dk with the previous step's term, the gradients of this step's scores, and the rest of the previous
    step's dq.
    """
    spec, tile, buffers, shape = call.spec, call.tile, call.buffers, (WGMMA_M, call.tile.block_q)
    slot, last = (lax.rem(n, I32(tile.query_stages)) for n in (steps_done, jnp.maximum(steps_done - 1, 0)))
    place = lax.rem(steps_done, I32(2))
    if not spec.has_segments:
        plgpu.barrier_wait(buffers["q_full"].at[slot])
    delta = broadcast_to_rows(arrays.load_column_vector(buffers["delta"].at[slot]), shape)

    def issue_products(refs: Any) -> None:
        dk_ref, dweights_ref, dq_accumulator_ref, ds_ref, pending_dq_strip_ref = refs
        # dk of the previous step: its operand ds is in registers, and the product runs while strips are handed over.
        plgpu.wgmma(dk_ref, ds, buffers["q"].at[last])
        _pass_dq_to_adders(call, steps_done - 2, 1, 1, pending_dq_strip)
        if not spec.has_segments:
            plgpu.barrier_wait(buffers["do_full"].at[0])
        plgpu.wgmma(dweights_ref, buffers["v"].at[_opaque_zero()], buffers["do"].at[_opaque_zero()].transpose((1, 0)))
        _issue_dq_products(call, steps_done - 1, 1, dq_accumulator_ref)
        # Waits for all but dq's two products.
        new = plgpu.wgmma_accumulator_load(dweights_ref, wait_n=tile.blocks_per_cluster)
        plgpu.barrier_wait(buffers["weights_full"])
        # Not earlier: `weights_full` makes warpgroup 0's writes visible.
        factors = arrays.widen_to_float32(arrays.load_score_tile(buffers["ds"].at[place]))
        if spec.has_dropout:
            delta = arrays.load_column_vector(buffers["delta"].at[slot])
            # A negative factor marks a dropped weight: its gradient has no term <do, v>, but has delta.
            new, factors = dropout.select_by_sign(factors, new, delta), jnp.abs(factors)
        ds_ref[...] = (factors * new).astype(spec.dtype)
        plgpu.commit_smem()  # all weights have been read
        plgpu.barrier_arrive(buffers["do_free"].at[0])
        pl.when(steps_done > 0)(lambda: plgpu.barrier_arrive(buffers["q_free"].at[last]))
        buffers["ds"].at[place][...] = ds_ref[...]
        plgpu.commit_smem()
        # Committed, since a bulk copy reads shared memory through the async proxy.
        clusters.send_score_gradients(buffers["ds"].at[place], buffers["ds"].at[place + 2], buffers["pair"], steps_done)
        pending_dq_strip_ref[...] = _pass_first_dq_strip(
            call, steps_done - 1, 1, plgpu.wgmma_accumulator_load(dq_accumulator_ref)
        )

    initial_refs = (
        MAKE_ACCUMULATOR_REF(dk),
        MAKE_ACCUMULATOR_REF(delta),
        MAKE_ACCUMULATOR_REF(_zero_dq_tile()),
        arrays.zero_tile(shape).astype(spec.dtype),
        pending_dq_strip,
    )
    dk, _, _, new, pending_dq_strip = pl.run_state(issue_products)(initial_refs)
    return dk, new, pending_dq_strip
