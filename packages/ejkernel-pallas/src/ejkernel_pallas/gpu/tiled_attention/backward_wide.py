"""The backward kernel's warpgroups that multiply for large heads, of which one's registers hold one gradient.

The first has scores and weights, sums dv up, and makes dq of the gradients of scores that the second makes; that one
sums dk up. Weights go to the second through shared memory, and what it makes of them takes their place.
"""

import functools
from typing import Any

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from ejkernel_pallas.gpu.tiled_attention import arrays, schedule
from ejkernel_pallas.gpu.tiled_attention.arrays import over_rows
from ejkernel_pallas.gpu.tiled_attention.backward_call import I32, Call, await_visited, clean, hidden
from ejkernel_pallas.gpu.tiled_attention.tiles import ROWS

INITIAL = plgpu.WGMMAAccumulatorRef.init


def own_wide(call: Call, item: schedule.Item, w: Any, visits: Any) -> None:
    """What the two warpgroups do for their block's keys."""
    plgpu.barrier_wait(call.buffers["own_full"])
    pl.when(w == 0)(functools.partial(_own_values, call, item, visits))
    pl.when(w == 1)(functools.partial(_own_keys, call, item, visits))


def _own_values(call: Call, item: schedule.Item, visits: Any) -> None:
    spec, tile, buffers = call.spec, call.tile, call.buffers
    key, row_ids = item.tile * ROWS, None
    if spec.segments:
        row_ids = arrays.load_rows(buffers["k_ids"].at[0])
        clean(buffers["k_ids"].at[0], buffers["k"].at[0])

    def visit(cut: bool, _: Any, index: Any, state: Any) -> Any:
        count, dv = state
        slot, place = lax.rem(count, I32(tile.depth)), lax.rem(count, I32(2))
        await_visited(call, count, cut)
        hide = functools.partial(hidden, call, key, row_ids, slot, index) if cut else None
        weights, bent = _weigh(call, slot, hide)
        buffers["ds"].at[place][...] = bent.astype(spec.dtype)
        plgpu.commit_smem()
        plgpu.barrier_arrive(buffers["weights_full"])
        plgpu.barrier_arrive(buffers["q_free"].at[slot])
        weights = lax.optimization_barrier(weights.astype(spec.dtype))

        def products(refs: Any) -> None:
            dv_ref, dq_ref = refs
            plgpu.barrier_wait(buffers["ds_full"])
            _multiply_slopes(call, 1 - place, 0, dq_ref)
            if not spec.segments:
                plgpu.barrier_wait(buffers["do_full"].at[0])
            plgpu.wgmma(dv_ref, weights, buffers["do"].at[_first()])
            _hand_over(call, 0, count, plgpu.wgmma_accumulator_load(dq_ref, wait_n=1))

        dv, _ = pl.run_state(products)((INITIAL(dv), INITIAL(_no_dq(call))))
        plgpu.barrier_arrive(buffers["do_free"].at[0])
        _hand_over(call, 1, count, _piece(call, 1 - place, 1))
        return count + 1, dv

    count, dv = visits(visit, (I32(0), arrays.full_tile((ROWS, spec.size))), tile.cuts(spec))
    plgpu.barrier_wait(buffers["ds_full"])
    buffers["v"].at[0][...] = dv.astype(spec.dtype)
    for piece in range(tile.pieces):
        _hand_over(call, piece, count, _piece(call, lax.rem(count + 1, I32(2)), piece))
    plgpu.barrier_arrive(buffers["dq_done"])
    _write(item, buffers["v"].at[0], call.outputs[1])


def _write(item: schedule.Item, gradient: Any, output: Any) -> None:
    """Writes a gradient of the block's 64 keys."""
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(gradient, output.at[item.batch, pl.ds(item.tile * ROWS, ROWS), item.head])
    plgpu.wait_smem_to_gmem(0)


def _weigh(call: Call, slot: Any, hide: Any) -> tuple[Any, Any]:
    """A visit's weights, and what gradients of weights are multiplied with."""
    spec, buffers, shape = call.spec, call.buffers, (ROWS, call.tile.queries)

    def product(scores_ref: Any) -> Any:
        if not spec.segments:
            plgpu.barrier_wait(buffers["q_full"].at[slot])
        plgpu.wgmma(scores_ref, buffers["k"].at[_first()], buffers["q"].at[slot].transpose((1, 0)))
        return scores_ref[...]

    scores, bend = pl.run_scoped(product, plgpu.WGMMAAccumulatorRef(shape, jnp.float32)), None
    if spec.cap is not None:
        scores = jnp.tanh(scores * spec.inner)
        bend = 1 - scores * scores
    if hide is not None:
        scores = hide(scores)
    weights = jnp.exp2(scores * spec.exponent - over_rows(arrays.load_columns(buffers["shift"].at[slot]), shape))
    return weights, weights if bend is None else weights * bend


def _multiply_slopes(call: Call, place: Any, piece: int, dq_ref: Any) -> None:
    """Issues the product that is a piece of a visit's part of dq."""
    columns = pl.ds(piece * call.tile.dq_columns, call.tile.dq_columns)
    plgpu.wgmma(dq_ref, call.buffers["ds"].at[place].transpose((1, 0)), call.buffers["k"].at[_first(), :, columns])


def _first() -> Any:
    """Zero, but not known before a visit: else places in shared memory would be, and take registers up."""
    return lax.optimization_barrier(I32(0))


def _piece(call: Call, place: Any, piece: int) -> Any:
    product = functools.partial(_multiply_slopes, call, place, piece)
    return pl.run_state(product)(INITIAL(_no_dq(call)))


def _no_dq(call: Call) -> Any:
    return arrays.full_tile((ROWS, call.tile.dq_columns))


def _hand_over(call: Call, piece: int, count: Any, dq: Any) -> None:
    """Leaves a piece of the last visit's part of dq to the warps that add; before the first visit nobody takes it."""
    buffers = call.buffers
    pl.when(count > 1 - piece)(lambda: plgpu.barrier_wait(buffers["dq_free"]))
    buffers["dq"].at[0][...] = dq
    plgpu.commit_smem()
    pl.when(count > 0)(lambda: plgpu.barrier_arrive(buffers["dq_full"].at[piece]))


def _own_keys(call: Call, item: schedule.Item, visits: Any) -> None:
    spec, tile, buffers = call.spec, call.tile, call.buffers
    plgpu.barrier_arrive(buffers["ds_full"])  # of no visit
    if spec.segments:
        clean(buffers["k_ids"].at[0], buffers["v"].at[0])

    def visit(cut: bool, _head: Any, _index: Any, state: Any) -> Any:
        count, dk, slopes = state
        slot, last = (lax.rem(n, I32(tile.depth)) for n in (count, jnp.maximum(count - 1, 0)))
        place = buffers["ds"].at[lax.rem(count, I32(2))]
        await_visited(call, count, cut)
        dk, made = _slope(call, slot, last, place, dk, slopes)
        plgpu.barrier_arrive(buffers["do_free"].at[0])
        pl.when(count > 0)(lambda: plgpu.barrier_arrive(buffers["q_free"].at[last]))
        plgpu.commit_smem()  # all weights have been read
        slopes = lax.optimization_barrier(made.astype(spec.dtype))
        place[...] = slopes
        plgpu.commit_smem()
        plgpu.barrier_arrive(buffers["ds_full"])
        return count + 1, dk, slopes

    nothing = arrays.full_tile((ROWS, tile.queries)).astype(spec.dtype)
    count, dk, slopes = visits(visit, (I32(0), arrays.full_tile((ROWS, spec.size)), nothing), spec.segments)
    last = buffers["q"].at[lax.rem(count - 1, I32(tile.depth))]
    made: Any = pl.run_state(lambda dk_ref: plgpu.wgmma(dk_ref, slopes, last))(INITIAL(dk))
    plgpu.barrier_wait(buffers["dq_done"])
    buffers["k"].at[0][...] = (made * spec.scale).astype(spec.dtype)
    _write(item, buffers["k"].at[0], call.outputs[0])


def _slope(call: Call, slot: Any, last: Any, place: Any, dk: Any, slopes: Any) -> tuple[Any, Any]:
    """dk with the last visit's part, and the gradients of this visit's scores."""
    spec, buffers, shape = call.spec, call.buffers, (ROWS, call.tile.queries)
    if not spec.segments:
        plgpu.barrier_wait(buffers["q_full"].at[slot])
    delta = over_rows(arrays.load_columns(buffers["delta"].at[slot]), shape)

    def products(refs: Any) -> None:
        dk_ref, slopes_ref, made_ref = refs
        if not spec.segments:
            plgpu.barrier_wait(buffers["do_full"].at[0])
        plgpu.wgmma(slopes_ref, buffers["v"].at[_first()], buffers["do"].at[_first()].transpose((1, 0)))
        plgpu.wgmma(dk_ref, slopes, buffers["q"].at[last])
        new = plgpu.wgmma_accumulator_load(slopes_ref, wait_n=1)
        plgpu.barrier_wait(buffers["weights_full"])
        made_ref[...] = arrays.widened(arrays.load_tile(place)) * new

    dk, _, made = pl.run_state(products)((INITIAL(dk), INITIAL(delta), arrays.full_tile(shape)))
    return dk, made
