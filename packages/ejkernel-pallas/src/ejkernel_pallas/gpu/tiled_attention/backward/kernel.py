"""The backward kernel: blocks own keys and values, and add their part of the queries' gradients up in turns.

A block owns 128 keys, each of two warpgroups 64 of them, and visits tiles of queries. A visit's scores are transposed,
keys by queries, so that weights and gradients of scores are, in the registers that they are made in, the left sides of
the products that dv and dk sum up. Gradients of scores go to shared memory, too, where both warpgroups take what the
block's part of dq is a product of; each makes one half of it. A visit's weights are exponentiated under the last one's
product for dk, and its gradients of scores are made under those for dv and for the last one's dq; and the warpgroups
take turns, so that one's products run while the other does something else.

With queries and keys of 192 and values of 128, dk and dv take 160 of a thread's 240 registers (a *crowded* tile). Then
gradients of scores stay in shared memory, from where dk's product reads them, and the last visit's dq is made after
this visit's gradients of scores, in the registers that those of weights have left:

    registers   dk dv 160 | scores 32, weights 16 | gradients of weights 32, of scores 16 | dq 48
    products              | S(t), dk(t-1)         | dP(t), dv(t)                          | dq(t-1)

Both warpgroups make 96 columns of dq, so that queries, keys and gradients of scores lie in parts of 32 columns (64-byte
swizzle), of which 96 is a whole number.

For every tile of queries there is a turn: the blocks that visit it add to it in the order of their keys, and two runs
give the same bits. All visit later queries first. So a block that begins a visit after the one before it never waits,
and it never waits for a block that began after it.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from ejkernel_pallas.gpu.hopper import arrays, clusters, tile_scheduler
from ejkernel_pallas.gpu.hopper.arrays import over_rows
from ejkernel_pallas.gpu.hopper.ping_pong import await_turn, pass_turn
from ejkernel_pallas.gpu.hopper.powers_of_two import powers
from ejkernel_pallas.gpu.hopper.sizes import ROWS
from ejkernel_pallas.gpu.tiled_attention.backward.call import (
    I32,
    Call,
    Visits,
    await_visited,
    clean,
    handed_over,
    hidden,
    of_keys,
    pattern_words,
    query_numbers,
    visit_heads,
    write_part,
)
from ejkernel_pallas.gpu.tiled_attention.backward.data_movement import add_parts, fetch
from ejkernel_pallas.gpu.tiled_attention.backward.kernel_wide import own_wide
from ejkernel_pallas.gpu.tiled_attention.masks import dropout
from ejkernel_pallas.gpu.tiled_attention.tiles import WARPGROUPS, BackwardTile


def backward_kernel(call: Call) -> None:
    """Gradients of keys and values, and sums that are gradients of queries."""
    warpgroup, tile = lax.axis_index("warpgroup"), call.tile
    number = _number(call, warpgroup)
    item, visits = (
        tile_scheduler.item(call.plan, number),
        tile_scheduler.visits(call.plan, call.operands["table"], number),
    )
    visits = functools.partial(visit_heads, call, Visits(item, item.head * call.spec.group, visits))

    @pl.when(warpgroup < WARPGROUPS)
    def _multiply() -> None:
        plgpu.set_max_registers(tile.registers, action="increase")
        (own_wide if tile.wide else own_keys)(call, item, warpgroup, visits)

    @pl.when(warpgroup == WARPGROUPS)
    def _move() -> None:
        plgpu.set_max_registers(tile.fetching_registers, action="decrease")

        @plgpu.warp_map
        def _(warp: Any) -> None:
            pl.when(warp == 0)(functools.partial(fetch, call, item, visits))
            pl.when((warp > 0) & (warp <= tile.adders))(functools.partial(add_parts, call, item, visits, warp - 1))

    if tile.wide:
        clusters.end()


def _number(call: Call, warpgroup: Any) -> Any:
    """Number of the block's tile of keys: how many blocks have begun before it, all that it may have to wait for."""
    if call.tile.wide:
        clusters.begin(call.taken, call.buffers["pair"])
        return call.buffers["pair"][0]
    number, full = call.buffers["number"], call.buffers["number_full"]

    @pl.when(warpgroup == WARPGROUPS)
    def _take() -> None:
        tile_scheduler.take(call.plan, call.taken, number.at[0])
        plgpu.barrier_arrive(full)

    plgpu.barrier_wait(full)
    return number[0] - call.plan.blocks


def own_keys(call: Call, item: tile_scheduler.Item, w: Any, visits: Any) -> None:
    spec, tile, buffers = call.spec, call.tile, call.buffers
    plgpu.barrier_arrive(buffers["ds_full"])  # of no visit
    pl.when(w == WARPGROUPS - 1)(functools.partial(pass_turn, WARPGROUPS))
    plgpu.barrier_wait(buffers["own_full"])
    if spec.segments:
        owned = [(buffers["k"].at[part * WARPGROUPS + w], tile.line("k")) for part in range(tile.parts)]
        clean(_key_ids(call, item, w), (buffers["v"].at[w], tile.line("v")), *owned)

    def visit(mask: bool, head: Any, place: Any, state: Any) -> Any:
        count, dk, dv, slopes = state
        index = call.query_block(item, head, place)
        # Places in shared memory are made anew in every visit: before the loop, they would take registers up.
        own = lax.optimization_barrier(w)
        slot, last = (lax.rem(n, I32(tile.stages["q"])) for n in (count, jnp.maximum(count - 1, 0)))
        await_visited(call, count, mask)
        key = item.tile * tile.keys + own * ROWS
        row_ids = arrays.load_rows(_key_ids(call, item, own)) if mask and spec.segments else None
        words = pattern_words(call, item, head, place, own) if mask else ()
        hide = functools.partial(hidden, call, key, row_ids, slot, index, words) if mask else None
        drawn = functools.partial(_numbers, call, item, own, slot, head, index)
        slopes = _last_slopes(call, own, count) if tile.crowded else slopes
        dk, *weights = _weigh(call, own, slot, last, dk, slopes, hide, drawn)
        if spec.drops:
            slopes = weights.pop()
        else:
            slopes = over_rows(arrays.load_columns(buffers["delta"].at[slot]), (ROWS, tile.queries))
        pl.when(count > 0)(lambda: plgpu.barrier_arrive(buffers["q_free"].at[last]))
        dv, dq, slopes = _slope(call, own, count, dv, slopes, *weights)
        plgpu.barrier_arrive(buffers["do_free"].at[lax.rem(count, I32(tile.stages["do"]))])
        if tile.crowded:
            dq, slopes = _late_dq(call, own, count, slopes), None
        else:
            _store_slopes(call, own, count, slopes)
        _hand_over(call, own, count, dq)
        plgpu.barrier_arrive(buffers["ds_full"])
        return count + 1, dk, dv, slopes

    zeros = {size: arrays.full_tile((ROWS, size)) for size in {spec.size, spec.value_size}}
    begin = I32(0), zeros[spec.size], zeros[spec.value_size], _no_slopes(call, w)
    count, dk, dv, slopes = visits(visit, begin, tile.cuts(spec))
    _write_values(call, item, w, dv * spec.kept)
    last = lax.rem(count - 1, I32(tile.stages["q"]))
    dk = _finish(call, w, count, last, dk, _last_slopes(call, w, count) if tile.crowded else slopes)
    _write_keys(call, item, w, dk * (spec.scale * spec.kept))


def _key_ids(call: Call, item: tile_scheduler.Item, w: Any) -> Any:
    """Segment ids of a warpgroup's keys."""
    return of_keys(call, "k_ids", item, w) if call.tile.crowded else call.buffers["k_ids"].at[w]


def _numbers(call: Call, item: tile_scheduler.Item, w: Any, slot: Any, head: Any, index: Any) -> tuple[Any, Any]:
    """Dropout's numbers of a warpgroup's keys and of a visit's queries."""
    if call.tile.crowded:
        return arrays.load_rows(of_keys(call, "k_numbers", item, w)), query_numbers(call, item, head, index)
    rows, columns = call.buffers["k_numbers"].at[w], call.buffers["q_numbers"].at[slot]
    return arrays.load_rows(rows), arrays.load_columns(columns)


def _write_values(call: Call, item: tile_scheduler.Item, w: Any, dv: Any) -> None:
    """Leaves a tile's dv in the place of the values, or writes that of a part."""

    def leave() -> None:
        call.buffers["v"].at[w][...] = dv.astype(call.spec.dtype)

    tile_scheduler.whole_or_part(call.plan, item, leave, functools.partial(write_part, call, item, "v", w * ROWS, dv))


def _write_keys(call: Call, item: tile_scheduler.Item, w: Any, dk: Any) -> None:
    """Writes both gradients of a tile, once no product reads the keys any more, or dk of a part."""
    plgpu.barrier_arrive(call.buffers["dq_done"])
    plgpu.barrier_wait(call.buffers["dq_done"])
    whole = functools.partial(_write_tile, call, item, w, dk)
    tile_scheduler.whole_or_part(call.plan, item, whole, functools.partial(write_part, call, item, "k", w * ROWS, dk))


def _write_tile(call: Call, item: tile_scheduler.Item, w: Any, dk: Any) -> None:
    """Writes both gradients; dk leaves through the keys' place."""
    tile, buffers = call.tile, call.buffers
    for part in range(tile.parts):
        columns = dk[:, part * tile.part : (part + 1) * tile.part]
        buffers["k"].at[part * WARPGROUPS + w][...] = columns.astype(call.spec.dtype)
    plgpu.commit_smem()
    rows = pl.ds(item.tile * tile.keys + w * ROWS, ROWS)
    for part in range(tile.parts):
        target = call.outputs[0].at[item.batch, rows, item.head, pl.ds(part * tile.part, tile.part)]
        plgpu.copy_smem_to_gmem(buffers["k"].at[part * WARPGROUPS + w], target)
    plgpu.copy_smem_to_gmem(buffers["v"].at[w], call.outputs[1].at[item.batch, rows, item.head])
    plgpu.wait_smem_to_gmem(0)


def _weigh(
    call: Call, w: Any, slot: Any, last: Any, dk: Any, slopes: Any, hide: Any, drawn: Callable[[], tuple[Any, Any]]
) -> tuple[Any, ...]:
    """dk with the last visit's part, and, made under its product, this visit's weights.

    With a soft cap also the weights times its slope, as narrow as weights: in float32, or as the slope alone, they
    would not stay in registers. With dropout also what gradients of weights are summed up on top of.
    """
    spec, tile, buffers = call.spec, call.tile, call.buffers
    shape = (ROWS, tile.queries)
    caps = spec.cap is not None

    def products(refs: Any) -> None:
        dk_ref, scores_ref, *made_refs = refs
        if not spec.segments:
            plgpu.barrier_wait(buffers["q_full"].at[slot])
        if tile.weighs_in_turns:
            await_turn(WARPGROUPS)
        for part in range(tile.parts):
            queries = buffers["q"].at[slot, :, pl.ds(part * tile.part, tile.part)]
            plgpu.wgmma(scores_ref, buffers["k"].at[part * WARPGROUPS + w], queries.transpose((1, 0)))
        plgpu.wgmma(dk_ref, slopes, buffers["q"].at[last])
        if tile.weighs_in_turns:
            pass_turn(WARPGROUPS)
        scores = plgpu.wgmma_accumulator_load(scores_ref, wait_n=1)
        capped = jnp.tanh(scores * spec.inner) if caps else None
        scores = scores if capped is None else capped
        scores = scores if hide is None else hide(scores)
        shift = over_rows(arrays.load_columns(buffers["shift"].at[slot]), shape)
        if caps and hide is None:
            weights = powers(scores, spec.exponent, shift)
        else:
            weights = jnp.exp2(scores * spec.exponent - shift)
        made = _dropped(call, slot, drawn, *_factors(weights, capped)) if spec.drops else _factors(weights, capped)
        for ref, value in zip(made_refs, made, strict=True):
            ref[...] = value.astype(ref.dtype)

    initial, made = plgpu.WGMMAAccumulatorRef.init, arrays.full_tile(shape)
    outputs = [made.astype(spec.dtype)] * (1 + caps) + [made] * spec.drops
    dk, _, *weights = pl.run_state(products)((initial(dk), initial(made), *outputs))
    return dk, *weights


def _factors(weights: Any, capped: Any) -> Iterator[Any]:
    """Weights, and with a soft cap these times its slope, made when weights are narrow: for both there is no room."""
    yield weights
    if capped is not None:
        yield weights * (1 - capped * capped)


def _dropped(call: Call, slot: Any, drawn: Callable[[], tuple[Any, Any]], *given: Any) -> list[Any]:
    """What `_weigh` makes of a visit's weights, and of these times the cap's slope where there is a cap.

    A weight p that is dropped has no part in dv, but the gradient of its score is -p delta, and there are no registers
    for p beside the zero. So gradients of weights are summed up on top of -p delta / tiny there, instead of -delta, and
    their factor is tiny, instead of p: what <do, v> adds is lost, and so is the weight in dv.
    """
    spec, buffers, (rows, columns) = call.spec, call.buffers, drawn()
    delta, *weights, factors = arrays.load_columns(buffers["delta"].at[slot]), *given
    shape, tiny = factors.shape, dropout.TINY[spec.dtype.name]
    begun = over_rows(delta, shape), factors * over_rows(delta * (1 / tiny), shape)
    return dropout.where_kept(spec, rows, columns, *((x, 0.0) for x in weights), (factors, tiny), begun)


def _slope(
    call: Call, w: Any, count: Any, dv: Any, slopes: Any, weights: Any, bent: Any = None
) -> tuple[Any, Any, Any]:
    """dv with this visit's part, the last visit's part of dq, and the gradients of this visit's scores.

    Gradients of weights are summed up on top of `slopes`: delta, negative. Of a crowded tile dq is None: `_late_dq`
    makes it in the registers that gradients of weights have left.
    """
    spec, tile, buffers = call.spec, call.tile, call.buffers
    shape, slot = (ROWS, tile.queries), lax.rem(count, I32(tile.stages["do"]))
    one = 1 + lax.shift_right_logical(w, I32(8))
    weights = _renamed(weights, one)
    slopes = _renamed(slopes, one) if spec.drops else slopes

    def products(refs: Any) -> None:
        dv_ref, slopes_ref, *dq_refs, made_ref = refs
        if not spec.segments:
            plgpu.barrier_wait(buffers["do_full"].at[slot])
        await_turn(WARPGROUPS)
        plgpu.wgmma(slopes_ref, buffers["v"].at[w], buffers["do"].at[slot].transpose((1, 0)))
        plgpu.wgmma(dv_ref, weights, buffers["do"].at[slot])
        for dq_ref in dq_refs:
            _multiply_slopes(call, w, count, dq_ref)
        pass_turn(WARPGROUPS)
        later = 1 + WARPGROUPS * len(dq_refs)
        factors = arrays.widened(weights if bent is None else bent)
        made_ref[...] = (factors * plgpu.wgmma_accumulator_load(slopes_ref, wait_n=later)).astype(spec.dtype)

    initial = plgpu.WGMMAAccumulatorRef.init
    made = arrays.full_tile(shape).astype(spec.dtype)
    early = [] if tile.crowded else [initial(_no_dq(tile))]
    dv, _, *dq, slopes = pl.run_state(products)((initial(dv), initial(slopes), *early, made))
    return dv, dq[0] if dq else None, _renamed(slopes, one)


def _no_slopes(call: Call, w: Any) -> Any:
    """Gradients of scores before the first visit: zeros, which crowded tiles keep in shared memory."""
    nothing = arrays.full_tile((ROWS, call.tile.queries)).astype(call.spec.dtype)
    if not call.tile.crowded:
        return nothing
    _last_slopes(call, w, I32(0))[...] = nothing
    plgpu.commit_smem()
    return None


def _store_slopes(call: Call, w: Any, count: Any, slopes: Any) -> None:
    """Leaves a visit's gradients of a warpgroup's scores in shared memory."""
    for half in range(call.tile.queries // ROWS):
        part = slopes[:, half * ROWS : (half + 1) * ROWS]
        call.buffers["ds"].at[_ds_place(call.tile, count, w, half)][...] = part


def _last_slopes(call: Call, w: Any, count: Any) -> Any:
    """Where the last visit's gradients of a warpgroup's scores are in shared memory."""
    return call.buffers["ds"].at[_ds_place(call.tile, count + 1, w, 0)]


def _late_dq(call: Call, w: Any, count: Any, slopes: Any) -> Any:
    """The last visit's part of dq, by itself: the other warpgroup's products run meanwhile.

    The visit's gradients of scores leave their registers first. They take the place of those of the visit before the
    last, of which the other warpgroup has made its part of dq when it arrives at `ds_full` after the last one.
    """
    plgpu.barrier_wait(call.buffers["ds_full"])
    _store_slopes(call, w, count, slopes)
    plgpu.commit_smem()
    product = functools.partial(_multiply_slopes, call, w, count)
    return pl.run_state(product)(plgpu.WGMMAAccumulatorRef.init(_no_dq(call.tile)))


def _renamed(tile: Any, one: Any) -> Any:
    """A tile in registers of its own, after what came before: times a one that the compiler does not know.

    Narrow numbers are made while products are under way, where they take half the registers; but no register that is a
    product's input may be written there.
    """
    return lax.optimization_barrier(lax.optimization_barrier(tile) * one.astype(tile.dtype))


def _finish(call: Call, w: Any, count: Any, last: Any, dk: Any, slopes: Any) -> Any:
    """dk with the last visit's part, whose part of dq is handed over, too."""

    def products(refs: Any) -> None:
        dk_ref, dq_ref = refs
        plgpu.wgmma(dk_ref, slopes, call.buffers["q"].at[last])
        if call.tile.crowded:
            plgpu.barrier_wait(call.buffers["ds_full"])
        _multiply_slopes(call, w, count, dq_ref)

    initial = plgpu.WGMMAAccumulatorRef.init
    dk, dq = pl.run_state(products)((initial(dk), initial(_no_dq(call.tile))))
    _hand_over(call, w, count, dq)
    return dk


def _no_dq(tile: BackwardTile) -> Any:
    return arrays.full_tile((ROWS, tile.dq_columns))


def _multiply_slopes(call: Call, w: Any, count: Any, dq_ref: Any) -> None:
    """Issues the products that are the last visit's part of dq."""
    tile, buffers = call.tile, call.buffers
    if not tile.crowded:
        plgpu.barrier_wait(buffers["ds_full"])
    half, part = tile.dq_half(w)
    for other in range(WARPGROUPS):
        left = buffers["ds"].at[_ds_place(tile, count + 1, other, half)]
        plgpu.wgmma(dq_ref, left.transpose((1, 0)), buffers["k"].at[part * WARPGROUPS + other])


def _hand_over(call: Call, w: Any, count: Any, dq: Any) -> None:
    """Leaves the last visit's part of dq to the warps that add, and what else was written to shared memory."""
    buffers = call.buffers
    pl.when(count > 1)(lambda: plgpu.barrier_wait(buffers["dq_free"].at[0]))
    buffers["dq"].at[w][...] = dq
    plgpu.commit_smem()
    pl.when(count > 0)(lambda: plgpu.barrier_arrive(handed_over(call, count - 1, 0)))


def _ds_place(tile: BackwardTile, count: Any, w: Any, half: Any) -> Any:
    """Where a warpgroup's gradients of scores are, those of 64 queries."""
    return (lax.rem(count, I32(2)) * WARPGROUPS + w) * (tile.queries // ROWS) + half
