"""The backward kernels: one whose blocks own keys and values, and one whose blocks own queries.

Both recompute weights from scores and the residuals. A block owns one tile, each warpgroup 64 rows of it, and visits
tiles of the other side, which a further warpgroup fetches. Whoever owns a tile sums its gradient up in registers and
writes it once: nothing is added in memory, and two runs give the same bits.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from ejkernel_pallas.gpu.tiled_attention import arrays, masking, schedule
from ejkernel_pallas.gpu.tiled_attention.arrays import over_columns, over_rows
from ejkernel_pallas.gpu.tiled_attention.spec import Spec
from ejkernel_pallas.gpu.tiled_attention.tiles import ROWS, BackwardTile

I32 = jnp.int32
Buffers = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Call:
    """What a kernel is given.

    Attributes:
        spec: Constants.
        tile: Tile sizes.
        plan: Which block owns what.
        operands: Arrays in device memory.
        outputs: Likewise.
        buffers: Shared memory: `own_*` [warpgroups, ...] and `visit_*` [stages, ...], and barriers.
    """

    spec: Spec
    tile: BackwardTile
    plan: schedule.Plan
    operands: Buffers
    outputs: Any
    buffers: Buffers


def keys_kernel(call: Call) -> None:
    """Gradients of keys and values: a block owns keys, and visits the queries of all heads that share them."""
    number = lax.axis_index("block")
    visits, item = schedule.visits(call.plan, call.operands["table"], number), schedule.item(call.plan, number)
    heads = item.head * call.spec.group, call.spec.group
    own = (("k", item.head), ("v", item.head))
    _divide(call, item, own, functools.partial(_visit_heads, *heads, visits), functools.partial(_own_keys, call, item))


def queries_kernel(call: Call) -> None:
    """Gradients of queries: a block owns queries, and visits the keys of their head."""
    number = lax.axis_index("block")
    visits, item = schedule.visits(call.plan, call.operands["table"], number), schedule.item(call.plan, number)
    head = lax.div(item.head, I32(call.spec.group))
    own = (("q", item.head), ("do", item.head))
    _divide(
        call, item, own, functools.partial(_visit_heads, head, 1, visits), functools.partial(_own_queries, call, item)
    )


def _visit_heads(first: Any, heads: int, visits: Any, visit: Callable[..., Any], state: Any, cuts: bool) -> Any:
    """Visits tiles in runs: those cut before the full ones, the full ones, those cut after them."""
    start, clear, unclear, stop = visits

    def head(number: Any, state: Any) -> Any:
        if not cuts:
            return lax.fori_loop(start, stop, functools.partial(visit, False, first + number), state)
        state = lax.fori_loop(start, clear, functools.partial(visit, True, first + number), state)
        state = lax.fori_loop(clear, unclear, functools.partial(visit, False, first + number), state)
        return lax.fori_loop(unclear, stop, functools.partial(visit, True, first + number), state)

    return head(0, state) if heads == 1 else lax.fori_loop(0, heads, head, state)


def _divide(call: Call, item: schedule.Item, own: Any, visits: Any, work: Any) -> None:
    """Gives every warpgroup its part."""
    warpgroup, tile = lax.axis_index("warpgroup"), call.tile

    @pl.when(warpgroup < tile.warpgroups)
    def _multiply() -> None:
        plgpu.set_max_registers(tile.registers, action="increase")
        for name, head in own:
            _fetch_rows(call, item, name, head)
        work(warpgroup, visits)

    @pl.when(warpgroup == tile.warpgroups)
    def _fetch() -> None:
        plgpu.set_max_registers(tile.fetching_registers, action="decrease")
        visits(functools.partial(_fetch_visited, call, item), I32(0), False)


def _fetch_rows(call: Call, item: schedule.Item, name: str, head: Any) -> None:
    """Fetches the rows that a warpgroup owns, and what else is known of them."""
    w, buffers, operands = lax.axis_index("warpgroup"), call.buffers, call.operands
    rows = pl.ds(item.tile * call.tile.own + w * ROWS, ROWS)
    full = buffers["own_full"].at[w]
    plgpu.copy_gmem_to_smem(operands[name].at[item.batch, rows, head], buffers[f"own_{name}"].at[w], full)
    for extra in call.tile.extras(call.spec, name):
        source = operands[extra]
        source = source.at[item.batch, rows] if extra.endswith("ids") else source.at[item.batch, head, rows]
        plgpu.copy_gmem_to_smem(source, buffers[f"own_{extra}"].at[w], full)


def _fetch_visited(call: Call, item: schedule.Item, _: bool, head: Any, index: Any, count: Any) -> Any:
    """Fetches one visited tile, in two parts that are waited for apart."""
    buffers, operands = call.buffers, call.operands
    slot = lax.rem(count, I32(call.tile.stages))
    rows = pl.ds(index * call.tile.visit, call.tile.visit)
    pl.when(count >= call.tile.stages)(lambda: plgpu.barrier_wait(buffers["visit_free"].at[slot]))
    for name in call.tile.visited:
        full = buffers[f"{name}_full"].at[slot]
        plgpu.copy_gmem_to_smem(operands[name].at[item.batch, rows, head], buffers[f"visit_{name}"].at[slot], full)
        for extra in call.tile.extras(call.spec, name):
            source = operands[extra]
            source = source.at[item.batch, rows] if extra.endswith("ids") else source.at[item.batch, head, rows]
            plgpu.copy_gmem_to_smem(source, buffers[f"visit_{extra}"].at[slot], full)
    return count + 1


def _slopes(call: Call, products: Any, shift: Any, delta: Any, mask: Any) -> tuple[jax.Array, jax.Array]:
    """Weights, and their scores' gradients, of one tile in the operands' dtype.

    Args:
        call: The kernel's arguments.
        products: Issues the products that are scores and gradients of weights.
        shift: What powers of two of the scores are divided by, as a tile.
        delta: What is subtracted from the gradients of weights, as a tile.
        mask: Scores -> scores, or None.
    """
    spec, shape = call.spec, (ROWS, call.tile.visit)

    def multiply(scores_ref: Any, slopes_ref: Any) -> Any:
        products(scores_ref, slopes_ref)
        scores = plgpu.wgmma_accumulator_load(scores_ref, wait_n=1)
        if spec.cap is not None:
            scores = jnp.tanh(scores * spec.inner)
        bent = scores
        if mask is not None:
            scores = mask(scores)
        weights = jnp.exp2(scores * spec.exponent - shift())
        if spec.cap is None:
            return weights, plgpu.wgmma_accumulator_load(slopes_ref, wait_n=0), None
        return weights, plgpu.wgmma_accumulator_load(slopes_ref, wait_n=0), 1 - bent * bent

    accumulator = plgpu.WGMMAAccumulatorRef(shape, jnp.float32)
    weights, slopes, bend = pl.run_scoped(multiply, accumulator, accumulator)
    slopes = weights * (slopes - delta())
    if bend is not None:
        slopes = slopes * bend
    # Inputs of products: nothing may define them while other products are under way.
    return lax.optimization_barrier((weights.astype(spec.dtype), slopes.astype(spec.dtype)))


def _own_keys(call: Call, item: schedule.Item, w: Any, visits: Any) -> None:
    spec, tile, buffers = call.spec, call.tile, call.buffers
    key = item.tile * tile.own + w * ROWS
    keys, values = buffers["own_k"].at[w], buffers["own_v"].at[w]
    plgpu.barrier_wait(buffers["own_full"].at[w])
    row_ids: Any = arrays.load_rows(buffers["own_k_ids"].at[w]) if spec.segments else None

    def visit(mask: bool, _: Any, index: Any, state: Any) -> Any:
        count, dk, dv = state
        slot = lax.rem(count, I32(tile.stages))
        queries, cotangents = buffers["visit_q"].at[slot], buffers["visit_do"].at[slot]

        def products(scores_ref: Any, slopes_ref: Any) -> None:
            plgpu.barrier_wait(buffers["q_full"].at[slot])
            plgpu.wgmma(scores_ref, keys, queries.transpose((1, 0)))
            plgpu.barrier_wait(buffers["do_full"].at[slot])
            plgpu.wgmma(slopes_ref, values, cotangents.transpose((1, 0)))

        def hide(scores: Any) -> Any:
            if spec.segments:
                scores = masking.same_ids(scores, row_ids, arrays.load_columns(buffers["visit_q_ids"].at[slot]))
            return masking.within(scores, *masking.query_range(spec, ROWS, index * tile.visit, key))

        shape = (ROWS, tile.visit)
        weights, slopes = _slopes(
            call,
            products,
            lambda: over_rows(arrays.load_columns(buffers["visit_shift"].at[slot]), shape),
            lambda: over_rows(arrays.load_columns(buffers["visit_delta"].at[slot]), shape),
            hide if mask else None,
        )

        def sum_up(refs: Any) -> None:
            dk_ref, dv_ref = refs
            plgpu.wgmma(dv_ref, weights, cotangents)
            plgpu.wgmma(dk_ref, slopes, queries)

        dk, dv = pl.run_state(sum_up)((plgpu.WGMMAAccumulatorRef.init(dk), plgpu.WGMMAAccumulatorRef.init(dv)))
        plgpu.barrier_arrive(buffers["visit_free"].at[slot])
        return count + 1, dk, dv

    zeros = arrays.full_tile((ROWS, spec.size))
    _, dk, dv = visits(visit, (I32(0), zeros, zeros), tile.cuts(spec))
    keys[...] = (dk * spec.scale).astype(spec.dtype)
    values[...] = dv.astype(spec.dtype)
    plgpu.commit_smem()
    for source, output in zip((keys, values), call.outputs, strict=True):
        plgpu.copy_smem_to_gmem(source, output.at[item.batch, pl.ds(key, ROWS), item.head])
    plgpu.wait_smem_to_gmem(0)


def _own_queries(call: Call, item: schedule.Item, w: Any, visits: Any) -> None:
    spec, tile, buffers = call.spec, call.tile, call.buffers
    query = item.tile * tile.own + w * ROWS
    queries, cotangents = buffers["own_q"].at[w], buffers["own_do"].at[w]
    plgpu.barrier_wait(buffers["own_full"].at[w])
    row_ids: Any = arrays.load_rows(buffers["own_q_ids"].at[w]) if spec.segments else None
    shift, delta = arrays.load_rows(buffers["own_shift"].at[w]), arrays.load_rows(buffers["own_delta"].at[w])

    def visit(mask: bool, _: Any, index: Any, state: Any) -> Any:
        count, dq = state
        slot = lax.rem(count, I32(tile.stages))
        keys, values = buffers["visit_k"].at[slot], buffers["visit_v"].at[slot]

        def products(scores_ref: Any, slopes_ref: Any) -> None:
            plgpu.barrier_wait(buffers["k_full"].at[slot])
            plgpu.wgmma(scores_ref, queries, keys.transpose((1, 0)))
            plgpu.barrier_wait(buffers["v_full"].at[slot])
            plgpu.wgmma(slopes_ref, cotangents, values.transpose((1, 0)))

        def hide(scores: Any) -> Any:
            if spec.segments:
                scores = masking.same_ids(scores, row_ids, arrays.load_columns(buffers["visit_k_ids"].at[slot]))
            return masking.within(scores, *masking.key_range(spec, ROWS, query, index * tile.visit))

        shape = (ROWS, tile.visit)
        _, slopes = _slopes(
            call,
            products,
            lambda: over_columns(shift, shape),
            lambda: over_columns(delta, shape),
            hide if mask else None,
        )
        dq = pl.run_state(lambda ref: plgpu.wgmma(ref, slopes, keys))(plgpu.WGMMAAccumulatorRef.init(dq))
        plgpu.barrier_arrive(buffers["visit_free"].at[slot])
        return count + 1, dq

    _, dq = visits(visit, (I32(0), arrays.full_tile((ROWS, spec.size))), tile.cuts(spec))
    queries[...] = (dq * spec.scale).astype(spec.dtype)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(queries, call.outputs[0].at[item.batch, pl.ds(query, ROWS), item.head])
    plgpu.wait_smem_to_gmem(0)
