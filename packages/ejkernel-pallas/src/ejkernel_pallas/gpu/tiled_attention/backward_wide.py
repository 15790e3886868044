"""The backward kernel's warpgroups that multiply for large heads, of which one's registers hold one gradient.

The first has scores and weights and sums dv up; the second makes gradients of scores of its weights, which go to it
through shared memory and are replaced there, and sums dk up. Each makes half of the block's part of dq, in two strips
that it hands over half a visit apart: device memory takes a visit's part hardly faster than it is made, and there is
room for one strip of each. The first makes a strip of the visit before the last together with the scores, and one of
the last together with dv.
"""

import functools
from typing import Any

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from ejkernel_pallas.gpu.tiled_attention import arrays, schedule
from ejkernel_pallas.gpu.tiled_attention.arrays import over_rows
from ejkernel_pallas.gpu.tiled_attention.backward_call import I32, Call, await_visited, clean, handed_over, hidden
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
        weights, bent = _weigh(call, count, slot, hide)
        # Before weights are handed over: else both barriers could be ahead by two, which looks like none.
        plgpu.barrier_wait(buffers["ds_full"])
        buffers["ds"].at[place][...] = bent.astype(spec.dtype)
        plgpu.commit_smem()
        plgpu.barrier_arrive(buffers["weights_full"])
        plgpu.barrier_arrive(buffers["q_free"].at[slot])
        weights = lax.optimization_barrier(weights.astype(spec.dtype))

        def products(refs: Any) -> None:
            dv_ref, dq_ref = refs
            _multiply_slopes(call, count - 1, 0, 0, dq_ref)
            if not spec.segments:
                plgpu.barrier_wait(buffers["do_full"].at[0])
            plgpu.wgmma(dv_ref, weights, buffers["do"].at[_first()])
            _hand_over(call, count - 1, 0, 0, plgpu.wgmma_accumulator_load(dq_ref, wait_n=1))

        dv, _ = pl.run_state(products)((INITIAL(dv), INITIAL(_no_dq(call))))
        plgpu.barrier_arrive(buffers["do_free"].at[0])
        return count + 1, dv

    count, dv = visits(visit, (I32(0), arrays.full_tile((ROWS, spec.size))), tile.cuts(spec))
    plgpu.barrier_wait(buffers["ds_full"])
    buffers["v"].at[0][...] = dv.astype(spec.dtype)
    for visited, strip in ((count - 2, 1), (count - 1, 0), (count - 1, 1)):
        _hand_over(call, visited, 0, strip, _strip(call, visited, 0, strip))
    plgpu.barrier_arrive(buffers["dq_done"])
    _write(item, buffers["v"].at[0], call.outputs[1])


def _write(item: schedule.Item, gradient: Any, output: Any) -> None:
    """Writes a gradient of the block's 64 keys."""
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(gradient, output.at[item.batch, pl.ds(item.tile * ROWS, ROWS), item.head])
    plgpu.wait_smem_to_gmem(0)


def _weigh(call: Call, count: Any, slot: Any, hide: Any) -> tuple[Any, Any]:
    """A visit's weights, and what gradients of weights are multiplied with."""
    spec, buffers, shape = call.spec, call.buffers, (ROWS, call.tile.queries)

    def products(refs: Any) -> None:
        dq_ref, scores_ref = refs
        _multiply_slopes(call, count - 2, 0, 1, dq_ref)
        if not spec.segments:
            plgpu.barrier_wait(buffers["q_full"].at[slot])
        plgpu.wgmma(scores_ref, buffers["k"].at[_first()], buffers["q"].at[slot].transpose((1, 0)))
        _hand_over(call, count - 2, 0, 1, plgpu.wgmma_accumulator_load(dq_ref, wait_n=1))

    made: Any = pl.run_state(products)((INITIAL(_no_dq(call)), INITIAL(arrays.full_tile(shape))))
    scores, bend = made[1], None
    if spec.cap is not None:
        scores = jnp.tanh(scores * spec.inner)
        bend = 1 - scores * scores
    if hide is not None:
        scores = hide(scores)
    weights = jnp.exp2(scores * spec.exponent - over_rows(arrays.load_columns(buffers["shift"].at[slot]), shape))
    return weights, weights if bend is None else weights * bend


def _multiply_slopes(call: Call, count: Any, w: int, strip: int, dq_ref: Any) -> None:
    """Issues the product that is a strip of a visit's part of dq."""
    slopes = call.buffers["ds"].at[lax.rem(count + 2, I32(2))]
    columns = pl.ds(call.tile.dq_start(w, strip)[1], call.tile.dq_columns)
    plgpu.wgmma(dq_ref, slopes.transpose((1, 0)), call.buffers["k"].at[_first(), :, columns])


def _first() -> Any:
    """Zero, but not known before a visit: else places in shared memory would be, and take registers up."""
    return lax.optimization_barrier(I32(0))


def _strip(call: Call, count: Any, w: int, strip: int) -> Any:
    product = functools.partial(_multiply_slopes, call, count, w, strip)
    return pl.run_state(product)(INITIAL(_no_dq(call)))


def _no_dq(call: Call) -> Any:
    return arrays.full_tile((ROWS, call.tile.dq_columns))


def _hand_over(call: Call, count: Any, w: int, strip: int, dq: Any) -> None:
    """Leaves a strip of a visit's part of dq to a warp that adds; before the first visit nobody takes it."""
    buffers = call.buffers
    pl.when(count > -strip)(lambda: plgpu.barrier_wait(buffers["dq_free"].at[w]))
    buffers["dq"].at[w][...] = dq
    plgpu.commit_smem()
    pl.when(count >= 0)(lambda: plgpu.barrier_arrive(handed_over(call, count, w)))


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
        dk, new = _slope(call, count, slot, last, dk, slopes)
        plgpu.barrier_arrive(buffers["do_free"].at[0])
        pl.when(count > 0)(lambda: plgpu.barrier_arrive(buffers["q_free"].at[last]))
        plgpu.commit_smem()  # all weights have been read
        slopes = lax.optimization_barrier(new.astype(spec.dtype))

        def product(dq_ref: Any) -> None:
            _multiply_slopes(call, count - 1, 1, 1, dq_ref)
            place[...] = slopes
            plgpu.commit_smem()

        dq = pl.run_state(product)(INITIAL(_no_dq(call)))
        plgpu.barrier_arrive(buffers["ds_full"])
        _hand_over(call, count - 1, 1, 1, dq)
        return count + 1, dk, slopes

    nothing = arrays.full_tile((ROWS, tile.queries)).astype(spec.dtype)
    count, dk, slopes = visits(visit, (I32(0), arrays.full_tile((ROWS, spec.size)), nothing), spec.segments)
    for strip in range(tile.strips):
        _hand_over(call, count - 1, 1, strip, _strip(call, count - 1, 1, strip))
    last = buffers["q"].at[lax.rem(count - 1, I32(tile.depth))]
    dk: Any = pl.run_state(lambda dk_ref: plgpu.wgmma(dk_ref, slopes, last))(INITIAL(dk))
    plgpu.barrier_wait(buffers["dq_done"])
    buffers["k"].at[0][...] = (dk * spec.scale).astype(spec.dtype)
    _write(item, buffers["k"].at[0], call.outputs[0])


def _slope(call: Call, count: Any, slot: Any, last: Any, dk: Any, slopes: Any) -> tuple[Any, Any]:
    """dk with the last visit's part, and the gradients of this visit's scores."""
    spec, buffers, shape = call.spec, call.buffers, (ROWS, call.tile.queries)
    place = buffers["ds"].at[lax.rem(count, I32(2))]
    if not spec.segments:
        plgpu.barrier_wait(buffers["q_full"].at[slot])
    delta = over_rows(arrays.load_columns(buffers["delta"].at[slot]), shape)

    def products(refs: Any) -> None:
        dk_ref, slopes_ref, dq_ref, new_ref = refs
        _multiply_slopes(call, count - 1, 1, 0, dq_ref)
        plgpu.wgmma(dk_ref, slopes, buffers["q"].at[last])
        if not spec.segments:
            plgpu.barrier_wait(buffers["do_full"].at[0])
        plgpu.wgmma(slopes_ref, buffers["v"].at[_first()], buffers["do"].at[_first()].transpose((1, 0)))
        _hand_over(call, count - 1, 1, 0, plgpu.wgmma_accumulator_load(dq_ref, wait_n=2))
        new = plgpu.wgmma_accumulator_load(slopes_ref, wait_n=0)
        plgpu.barrier_wait(buffers["weights_full"])
        new_ref[...] = arrays.widened(arrays.load_tile(place)) * new

    initial = INITIAL(dk), INITIAL(delta), INITIAL(_no_dq(call)), arrays.full_tile(shape)
    dk, _, _, new = pl.run_state(products)(initial)
    return dk, new
