"""The forward kernel: warpgroups that multiply and exponentiate in turns, and one that fetches for them.

A block owns tiles of queries one after the other, each warpgroup 64 rows. A step of a warpgroup issues the product of
its queries with the next tile of keys, then that of its last weights with their values, and exponentiates the new
scores while the second runs; meanwhile another warpgroup issues its products.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from ejkernel_pallas.gpu.tiled_attention import arrays, masking, schedule
from ejkernel_pallas.gpu.tiled_attention.arrays import over_columns
from ejkernel_pallas.gpu.tiled_attention.forward_call import Call, next_tile
from ejkernel_pallas.gpu.tiled_attention.forward_fetch import fetch_tile
from ejkernel_pallas.gpu.tiled_attention.spec import LN2, LOG2E, LOWEST, Spec
from ejkernel_pallas.gpu.tiled_attention.tiles import ROWS
from ejkernel_pallas.gpu.tiled_attention.warpgroups import await_turn, pass_turn

I32 = jnp.int32
Cut = Literal["opens", "closes"] | None
"""Which masks a tile needs: none, all, or, before the first that needs none, all but of keys that come too late."""


@dataclasses.dataclass(frozen=True)
class Own:
    """What a warpgroup owns in one turn.

    Attributes:
        item: The tile.
        row: Index of the warpgroup's first query.
        buffer: Where its queries are.
        row_ids: Their segment ids, or None.
    """

    item: schedule.Item
    row: Any
    buffer: Any
    row_ids: Any


class State(NamedTuple):
    """What a warpgroup carries from visit to visit.

    Attributes:
        count: Visits since the kernel started.
        output: Numerators, without the last visit's.
        peak: Running maximum of every row, as a power of two.
        total: Running sum of every row.
        weights: Of the last visit, not yet multiplied with their values.
    """

    count: Any
    output: Any
    peak: Any
    total: Any
    weights: Any


def forward_kernel(call: Call) -> None:
    """Body of the kernel: what each warpgroup does for all query tiles of its block."""
    warpgroup, tile = lax.axis_index("warpgroup"), call.tile
    first = lax.axis_index("block")
    begin = I32(0), I32(0), first, schedule.visits(call.plan, call.operands["table"], first)

    def every(turn_of: Any) -> None:
        lax.while_loop(lambda carry: carry[2] < call.plan.items, functools.partial(turn_of, call), begin)

    @pl.when(warpgroup < tile.warpgroups)
    def _multiply() -> None:
        plgpu.set_max_registers(tile.registers, action="increase")
        if call.spec.takes_turns:
            pl.when(warpgroup == tile.warpgroups - 1)(functools.partial(pass_turn, tile.warpgroups))
        every(_own_tile)
        plgpu.wait_smem_to_gmem(0)

    @pl.when(warpgroup == tile.warpgroups)
    def _fetch() -> None:
        plgpu.set_max_registers(tile.fetching_registers, action="decrease")
        every(fetch_tile)


def _own_tile(call: Call, carry: Any) -> Any:
    """Everything for one query tile."""
    turn, step, number, (start, clear, unclear, stop) = carry
    spec, shared, warpgroup = call.spec, call.shared, lax.axis_index("warpgroup")
    item, buffer = schedule.item(call.plan, number), call.buffer(turn, warpgroup)
    after = next_tile(call, turn)
    plgpu.barrier_wait(shared.q_full.at[buffer])
    row_ids = arrays.load_rows(shared.q_ids.at[buffer]) if spec.segments else None
    own = Own(item, item.tile * call.tile.queries + warpgroup * ROWS, buffer, row_ids)
    state = _begin(call, own, start, step)
    if call.tile.buffers > 1:
        pl.when(turn > 0)(lambda: _free_queries(call, call.buffer(turn - 1, warpgroup)))
    visit = functools.partial(_visit, call, own)
    if call.tile.cuts(spec):
        clear, unclear = jnp.maximum(clear, start + 1), jnp.maximum(unclear, start + 1)
        if spec.opens_masked:
            state = lax.fori_loop(start + 1, clear, functools.partial(visit, "opens"), state)
        state = lax.fori_loop(clear, unclear, functools.partial(visit, None), state)
        state = lax.fori_loop(unclear, stop, functools.partial(visit, "closes"), state)
    else:
        state = lax.fori_loop(start + 1, stop, functools.partial(visit, None), state)
    _write(call, own, _finish(call, state))
    if call.tile.buffers == 1:
        _free_queries(call, buffer)
    return turn + 1, state.count, *after


def _begin(call: Call, own: Own, start: Any, step: Any) -> State:
    """The first visit, which has no weights to multiply yet."""
    slot = call.slot(step)

    def product(scores_ref: Any) -> Any:
        plgpu.barrier_wait(call.shared.k_full.at[slot])
        plgpu.wgmma(scores_ref, call.shared.q.at[own.buffer], call.shared.k.at[slot].transpose((1, 0)))
        return scores_ref[...]

    scores = pl.run_scoped(product, plgpu.WGMMAAccumulatorRef((ROWS, call.tile.keys), jnp.float32))
    hide = _mask(call, own, start, slot, "closes") if call.tile.cuts(call.spec) else None
    lowest, nothing = arrays.full_rows(ROWS, LOWEST), arrays.full_rows(ROWS, 0.0)
    peak, total, weights, _ = _exponentiate(call.spec, scores, hide, lowest, nothing)
    plgpu.barrier_arrive(call.shared.k_free.at[slot])
    return State(step + 1, arrays.full_tile((ROWS, call.spec.size)), peak, total, _narrow(call, weights))


def _visit(call: Call, own: Own, cut: Cut, index: Any, state: State) -> State:
    """One visit: its scores, and the last visit's products while they are exponentiated."""
    shared, warpgroups = call.shared, call.tile.warpgroups
    slot, last = call.slot(state.count), call.slot(state.count - 1)

    def products(refs: Any) -> None:
        output_ref, scores_ref, peak_ref, total_ref, weights_ref, fade_ref = refs
        plgpu.barrier_wait(shared.k_full.at[slot])
        if call.spec.takes_turns:
            await_turn(warpgroups)
        plgpu.wgmma(scores_ref, shared.q.at[own.buffer], shared.k.at[slot].transpose((1, 0)))
        plgpu.barrier_wait(shared.v_full.at[last])
        plgpu.wgmma(output_ref, state.weights, shared.v.at[last])
        if call.spec.takes_turns:
            pass_turn(warpgroups)
        scores = plgpu.wgmma_accumulator_load(scores_ref, wait_n=1)
        hide = _mask(call, own, index, slot, cut)
        plgpu.barrier_arrive(shared.k_free.at[slot])
        new = _exponentiate(call.spec, scores, hide, peak_ref[...], total_ref[...])
        for ref, value in zip((peak_ref, total_ref, weights_ref, fade_ref), new, strict=True):
            ref[...] = value

    zeros, initial = arrays.full_tile((ROWS, call.tile.keys)), plgpu.WGMMAAccumulatorRef.init
    refs = (initial(state.output), initial(zeros), state.peak, state.total, zeros, state.peak)
    made: Any = pl.run_state(products)(refs)
    output, _, peak, total, weights, fade = made
    plgpu.barrier_arrive(shared.v_free.at[last])
    output = output * over_columns(fade, output.shape)
    return State(state.count + 1, output, peak, total, _narrow(call, weights))


def _mask(call: Call, own: Own, index: Any, slot: Any, cut: Cut) -> Callable[[Any], Any] | None:
    """Scores -> scores for a tile that is cut; what it needs of shared memory is read at once."""
    if cut is None:
        return None
    spec, key = call.spec, index * call.tile.keys
    column_ids = arrays.load_columns(call.shared.k_ids.at[slot]) if spec.segments else None

    def hide(scores: Any) -> Any:
        if column_ids is not None:
            scores = masking.same_ids(scores, own.row_ids, column_ids)
        first, last = masking.key_range(spec, ROWS, own.row, key)
        return masking.within(scores, first, None if cut == "opens" else last)

    return hide


def _exponentiate(spec: Spec, scores: Any, hide: Any, peak: Any, total: Any) -> tuple[Any, ...]:
    """New maximum and sum of every row, weights, and the factor of all that was summed up before."""
    if spec.cap is not None:
        scores = jnp.tanh(scores * spec.inner)
    if hide is not None:
        scores = hide(scores)
    top = jnp.maximum(peak, scores.max(axis=1) * spec.exponent)
    weights = jnp.exp2(scores * spec.exponent - over_columns(top, scores.shape))
    fade = jnp.exp2(peak - top)
    return top, total * fade + weights.sum(axis=1), weights, fade


def _narrow(call: Call, weights: Any) -> Any:
    """Weights as the next product takes them.

    Their registers are that product's input, which nothing may define while another product is under way; and without
    a barrier LLVM would do it elsewhere.
    """
    return lax.optimization_barrier(weights.astype(call.spec.dtype))


def _finish(call: Call, state: State) -> State:
    """The last product."""
    slot = call.slot(state.count - 1)

    def product(output_ref: Any) -> None:
        plgpu.barrier_wait(call.shared.v_full.at[slot])
        plgpu.wgmma(output_ref, state.weights, call.shared.v.at[slot])

    output = pl.run_state(product)(plgpu.WGMMAAccumulatorRef.init(state.output))
    plgpu.barrier_arrive(call.shared.v_free.at[slot])
    return state._replace(output=output)


def _write(call: Call, own: Own, state: State) -> None:
    """Normalises, and writes what lies within the arrays."""
    (_, output, peak, total, _), spec = state, call.spec
    if spec.sinks:
        sinks = call.operands["sinks"]
        sink = sinks[own.item.row(sinks), own.item.head] * LOG2E
        top = jnp.maximum(peak, sink)
        fade = jnp.exp2(peak - top)
        total, peak = total * fade + jnp.exp2(sink - top), top
        output = output * over_columns(fade, output.shape)
    some = total > 0
    inverse = 1 / jnp.where(some, total, 1)
    lse = jnp.where(some, peak * LN2 + jnp.log(jnp.where(some, total, 1)), -jnp.inf)
    outputs, sums = call.shared.q.at[own.buffer], call.shared.lse.at[own.buffer]
    outputs[...] = (output * over_columns(inverse, output.shape)).astype(spec.dtype)
    sums[...] = lse
    plgpu.commit_smem()
    item, rows = own.item, pl.ds(own.row, ROWS)
    plgpu.copy_smem_to_gmem(outputs, call.outputs[0].at[item.batch, rows, item.head])
    plgpu.copy_smem_to_gmem(sums, call.outputs[1].at[item.batch, item.head, rows])


def _free_queries(call: Call, buffer: Any) -> None:
    """Gives a buffer of queries back once the outputs in it have been read."""
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    plgpu.barrier_arrive(call.shared.q_free.at[buffer])
