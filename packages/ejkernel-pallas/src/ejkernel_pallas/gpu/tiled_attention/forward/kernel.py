"""The forward kernel: warpgroups that multiply and exponentiate in turns, and one that fetches for them.

A block owns tiles of queries one after the other, each warpgroup 64 rows. A step of a warpgroup issues the product of
its queries with the next tile of keys, then that of its last weights with their values, and exponentiates the new
scores while the second runs; meanwhile another warpgroup issues its products.
"""

import dataclasses
import functools
from typing import Any, Literal, NamedTuple

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from ejkernel_pallas.gpu.hopper import arrays, tile_scheduler, wgmma
from ejkernel_pallas.gpu.hopper.arrays import over_columns
from ejkernel_pallas.gpu.hopper.ping_pong import await_turn, pass_turn
from ejkernel_pallas.gpu.hopper.sizes import PART, ROWS
from ejkernel_pallas.gpu.tiled_attention.forward import softmax
from ejkernel_pallas.gpu.tiled_attention.forward.call import Call, next_tile
from ejkernel_pallas.gpu.tiled_attention.forward.producer import fetch_tile
from ejkernel_pallas.gpu.tiled_attention.masks import tile_masks
from ejkernel_pallas.gpu.tiled_attention.masks.dropout import zero_dropped
from ejkernel_pallas.gpu.tiled_attention.masks.key_ranges import MIXED
from ejkernel_pallas.gpu.tiled_attention.spec import LN2, LOG2E, LOWEST

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
    """

    item: tile_scheduler.Item
    row: Any
    buffer: Any


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
    begin = I32(0), I32(0), first, tile_scheduler.visits(call.plan, call.operands["table"], first)

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
    item, buffer = tile_scheduler.item(call.plan, number), call.buffer(turn, warpgroup)
    after = next_tile(call, turn)
    plgpu.barrier_wait(shared.q_full.at[buffer])
    own = Own(item, item.tile * call.tile.queries + warpgroup * ROWS, buffer)
    state = _begin(call, own, start, step)
    if call.tile.buffers > 1:
        pl.when(turn > 0)(lambda: _free_queries(call, call.buffer(turn - 1, warpgroup)))
    visit = functools.partial(_visit, call, own)
    end = _own_end(call, own, start, stop)
    if call.tile.cuts(spec):
        clear, unclear = jnp.maximum(clear, start + 1), jnp.maximum(unclear, start + 1)
        if call.tile.spare(spec):
            clear, unclear = jnp.minimum(clear, end), jnp.minimum(unclear, end)
        if spec.opens_masked:
            state = lax.fori_loop(start + 1, clear, functools.partial(visit, "opens"), state)
        state = lax.fori_loop(clear, unclear, functools.partial(visit, None), state)
        state = lax.fori_loop(unclear, end, functools.partial(visit, "closes"), state)
    else:
        state = lax.fori_loop(start + 1, stop, functools.partial(visit, None), state)
    _write(call, own, _finish(call, state))
    step = state.count if end is stop else lax.fori_loop(end, stop, functools.partial(_leave_out, call), state.count)
    if call.tile.buffers == 1:
        _free_queries(call, buffer)
    return turn + 1, step, *after


def _own_end(call: Call, own: Own, start: Any, stop: Any) -> Any:
    """Where the tiles of keys end that a warpgroup's queries see something of; they visit the first in any case."""
    spec, end = call.spec, stop
    if spec.right is not None and call.tile.uneven(spec):
        last = own.row + (ROWS - 1 + spec.right)
        end = jnp.clip(lax.div(last, I32(call.tile.keys)) + 1, start + 1, stop)
    return jnp.where(own.row < spec.queries, end, start + 1) if call.tile.spare(spec) else end


def _begin(call: Call, own: Own, start: Any, step: Any) -> State:
    """The first visit, which has no weights to multiply yet."""
    slot = call.slot(step)
    plgpu.barrier_wait(call.shared.k_full.at[slot])
    scores = wgmma.finish(wgmma.begin(call.shared.q.at[own.buffer], call.shared.k.at[slot]), under_way=0)
    plgpu.barrier_arrive(call.shared.k_free.at[slot])
    cut: Cut = "closes" if call.tile.cuts(call.spec) else None
    scores = _masked(call, own, _tile_mask(call, own, start, cut), cut, scores)
    peak, total = arrays.full_rows(ROWS, 0.0 if call.spec.settled else LOWEST), arrays.full_rows(ROWS, 0.0)
    peak, total, weights, _ = softmax.exponentiate(call.spec, scores, peak, total, cut is None)
    weights = _kept(call, own, step, weights)
    return State(step + 1, arrays.full_tile((ROWS, call.spec.value_size)), peak, total, _narrow(call, weights))


def _visit(call: Call, own: Own, cut: Cut, index: Any, state: State) -> State:
    """One visit: its scores, and the last visit's products while they are exponentiated."""
    shared, warpgroups = call.shared, call.tile.warpgroups
    slot, last = call.slot(state.count), call.slot(state.count - 1)

    # With a pattern the masks come from device memory: they are under way while the keys are waited for.
    mask = _tile_mask(call, own, index, cut)

    def multiply(refs: Any) -> None:
        output_ref, *row_refs = refs
        plgpu.barrier_wait(shared.k_full.at[slot])
        if call.spec.takes_turns:
            await_turn(warpgroups)
        scores = wgmma.begin(shared.q.at[own.buffer], shared.k.at[slot])
        plgpu.barrier_wait(shared.v_full.at[last])
        plgpu.wgmma(output_ref, state.weights, shared.v.at[last])
        if call.spec.takes_turns:
            pass_turn(warpgroups)
        scores = wgmma.finish(scores, under_way=1)
        plgpu.barrier_arrive(shared.k_free.at[slot])
        scores = _masked(call, own, mask, cut, scores)
        peak, total, weights, fade = softmax.exponentiate(call.spec, scores, state.peak, state.total, cut is None)
        new = peak, total, _kept(call, own, state.count, weights), fade
        for ref, value in zip(row_refs, new, strict=True):
            ref[...] = value

    zeros = arrays.full_tile((ROWS, call.tile.keys))
    refs = (plgpu.WGMMAAccumulatorRef.init(state.output), state.peak, state.total, zeros, state.peak)
    made: Any = pl.run_state(multiply)(refs)
    output, peak, total, weights, fade = made
    plgpu.barrier_arrive(shared.v_free.at[last])
    output = softmax.faded(call.spec, output, fade)
    return State(state.count + 1, output, peak, total, _narrow(call, weights))


def _leave_out(call: Call, _: Any, count: Any) -> Any:
    """A visit of which a warpgroup's queries see nothing: its place among the others', and nothing else."""
    shared, warpgroups, slot = call.shared, call.tile.warpgroups, call.slot(count)
    if call.spec.takes_turns:
        await_turn(warpgroups)
        pass_turn(warpgroups)
    for full, free in ((shared.k_full, shared.k_free), (shared.v_full, shared.v_free)):
        plgpu.barrier_wait(full.at[slot])
        plgpu.barrier_arrive(free.at[slot])
    return count + 1


class TileMask(NamedTuple):
    """What masks a visit's scores.

    Attributes:
        block: The key block.
        words: Bits of the pattern, as `tile_masks.load_words` has them; empty without a pattern.
    """

    block: Any
    words: tuple[Any, ...] = ()


def _tile_mask(call: Call, own: Own, place: Any, cut: Cut) -> TileMask:
    """What masks the scores of the visit at a place of the item's list, if it may be cut."""
    if cut is None or not call.spec.pattern:
        return TileMask(place)
    words = call.operands["mask_words"].at[I32(0), call.listed("mask_ids", own.item, place)]
    row = own.row - own.item.tile * call.tile.queries
    return TileMask(call.key_block(own.item, place), tile_masks.load_words(words, row, call.tile.keys))


def _masked(call: Call, own: Own, mask: TileMask, cut: Cut, scores: Any) -> Any:
    """Scores, with the soft cap, of a tile that may be cut; raw products if what makes weights of them has the cap."""
    spec, key = call.spec, mask.block * call.tile.keys
    if spec.cap is not None and not (cut is None and spec.caps_in_weights):
        scores = jnp.tanh(scores * spec.inner)
    if cut is None:
        return scores
    first, last, mixed = *tile_masks.key_range(spec, ROWS, own.row, key), None
    if spec.segments:
        first, last, mixed = _segment_range(call, own, key)
    last = None if cut == "opens" else last
    return tile_masks.within(scores, first, last, mixed, mask.words)


def _segment_range(call: Call, own: Own, key: Any) -> tuple[Any, Any, tile_masks.Mixed]:
    """First and last column of every row where there are segment ids, and what there is to compare."""
    first, last = (arrays.load_rows(call.shared.ranges.at[own.buffer, n]) for n in (0, 1))
    mixed = last >= MIXED
    # Places are made anew in every visit: before the loop, they would take registers up.
    batch, row = lax.optimization_barrier((own.item.batch, own.row))
    item, q_ids, k_ids = dataclasses.replace(own.item, batch=batch), call.operands["q_ids"], call.operands["k_ids"]
    rows, columns = q_ids.at[item.row(q_ids), pl.ds(row, ROWS)], k_ids.at[item.row(k_ids), pl.ds(key, call.tile.keys)]
    last = jnp.where(mixed, last - MIXED, last)
    return first - key, last - key, tile_masks.Mixed(mixed.astype(jnp.int32), rows, columns)


def _kept(call: Call, own: Own, count: Any, weights: Any) -> Any:
    """Weights with zeros in place of those that dropout drops."""
    if not call.spec.drops:
        return weights
    rows, columns = arrays.load_rows(call.shared.q_numbers.at[own.buffer]), arrays.load_columns(call.numbers(count))
    return zero_dropped(call.spec, rows, columns, weights)


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
    total = softmax.whole_sum(total)
    if spec.sinks:
        sinks = call.operands["sinks"]
        sink = sinks[own.item.row(sinks), own.item.head] * LOG2E
        if call.plan.split.tiles:  # a tile has its sink once
            sink = jnp.where(lax.rem(own.item.part, I32(call.plan.split.parts)) > 0, -jnp.inf, sink)
        top = jnp.maximum(peak, sink)
        fade = jnp.exp2(peak - top)
        total, peak = total * fade + jnp.exp2(sink - top), top
        output = output * over_columns(fade, output.shape)
    some = total > 0
    inverse = spec.kept / jnp.where(some, total, 1)
    lse = jnp.where(some, peak * LN2 + jnp.log(jnp.where(some, total, 1)), -jnp.inf)
    output = output * over_columns(inverse, output.shape)
    made = call, own, output, lse
    whole, part = (functools.partial(write, *made) for write in (_write_tile, _write_part))
    tile_scheduler.whole_or_part(call.plan, own.item, whole, part)


def _write_tile(call: Call, own: Own, output: Any, lse: Any) -> None:
    """Writes the rows of a whole tile that lie within the arrays, by way of shared memory."""
    sums, output = call.shared.lse.at[own.buffer], output.astype(call.spec.dtype)
    places = _output_places(call, own)
    for columns, place in places:
        place[...] = output if columns is None else output[:, columns.start : columns.start + columns.size]
    sums[...] = lse
    plgpu.commit_smem()
    item, rows = own.item, pl.ds(own.row, ROWS)
    for columns, place in places:
        target = call.outputs[0].at[item.batch, rows, item.head]
        plgpu.copy_smem_to_gmem(place, target if columns is None else target.at[:, columns])
    plgpu.copy_smem_to_gmem(sums, call.outputs[1].at[item.batch, item.head, rows])


def _output_places(call: Call, own: Own) -> list[tuple[Any, Any]]:
    """Columns of a warpgroup's outputs, None for all, and where they leave from: the place of its queries."""
    spec = call.spec
    if spec.value_size == spec.size:
        return [(None, call.shared.q.at[own.buffer])]
    first = own.buffer * (spec.size // PART)
    return [(pl.ds(n * PART, PART), call.shared.output.at[first + n]) for n in range(spec.value_size // PART)]


def _write_part(call: Call, own: Own, output: Any, lse: Any) -> None:
    """Writes the rows of a part of a tile, in float32."""
    _, _, outputs, sums = call.outputs
    rows = pl.ds(own.row - own.item.tile * call.tile.queries, ROWS)
    outputs[own.item.part, rows] = output
    sums[own.item.part, rows] = lse


def _free_queries(call: Call, buffer: Any) -> None:
    """Gives a buffer of queries back once the outputs in it have been read."""
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    plgpu.barrier_arrive(call.shared.q_free.at[buffer])
