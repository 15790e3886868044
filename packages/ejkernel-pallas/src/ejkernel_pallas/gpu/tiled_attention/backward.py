"""Backward pass of tiled softmax attention on Hopper.

With p = exp(s - lse), do and dlse the cotangents of output and lse, and delta_i = <do_i, o_i> - dlse_i:

    dv_j    = sum_i dropout_ij p_ij do_i
    ds_ij   = p_ij (dropout_ij <do_i, v_j> - delta_i), through the soft cap
    dq_i    = scale sum_j ds_ij k_j
    dk_j    = scale sum_i ds_ij q_i
    dsink_h = -sum_i exp(sink_h - lse_i) delta_i

XLA computes delta and the sink's gradient, which are sums over rows.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax

from ejkernel.arithmetic import LOG2E
from ejkernel.families.tiled_attention import TiledAttention, less_lse_cotangent, sinks_gradient
from ejkernel.families.tiled_attention.tile_pairs import padding_as_segments
from ejkernel.planning.batch_rows import in_rows
from ejkernel.types.pullback import Pullback
from ejkernel_pallas.gpu.hopper import clusters, tile_scheduler
from ejkernel_pallas.gpu.hopper.launch import launch, matrix, whole
from ejkernel_pallas.gpu.hopper.sizes import WGMMA_M
from ejkernel_pallas.gpu.hopper.split_tiles import WHOLE, make_split
from ejkernel_pallas.gpu.tiled_attention.config import WARPGROUPS, BackwardTile, HopperBackward, backward_tile
from ejkernel_pallas.gpu.tiled_attention.kernels.backward_call import Call
from ejkernel_pallas.gpu.tiled_attention.kernels.dropout import numbers
from ejkernel_pallas.gpu.tiled_attention.kernels.flash_backward import backward_kernel
from ejkernel_pallas.gpu.tiled_attention.plan.block_map import padded_ids, query_block_ranges, tiles, without_padding
from ejkernel_pallas.gpu.tiled_attention.plan.dq_order import first_adders
from ejkernel_pallas.gpu.tiled_attention.plan.pattern import query_lists
from ejkernel_pallas.gpu.tiled_attention.spec import (
    HopperSpec,
    make_spec,
)

Operands = dict[str, jax.Array]
BLOCKS_BETWEEN = 2
"""The smallest distance, in query blocks, between the starts of two thread blocks of a head."""
SHORT = 32
"""The assumed number of segments per row if their lengths are traced."""


def backward(pullback: Pullback, params: HopperBackward) -> dict[str, jax.Array]:
    """Returns the gradients of the requested fields of a record.

    Args:
        pullback: Record, residuals, output and its cotangent, and the names of the requested fields.
        params: Tile sizes and stages. A block accumulates dk and dv of `block_kv` keys and loops over blocks of
            `block_q` queries, with `stages` of them in shared memory.

    Raises:
        ValueError: A tile size is not valid for the kernel.

    Returns:
        The gradient of each requested field, in its shape and dtype.
    """
    wanted, spec = pullback.wanted, make_spec(pullback.record)
    tile = backward_tile(params, spec)
    operands, delta = _operands(pullback, spec, tile)
    gradients: dict[str, jax.Array] = {}
    if wanted & {"query", "key", "value"}:
        gradients = _gradients(spec, tile, operands, pullback.record)
    if "softmax_aux" in wanted:
        gradients["softmax_aux"] = sinks_gradient(pullback, delta)
    if spec.segments and "query" in wanted:
        # The query's gradient is NaN if a row was not finite; the keys that it attends to get nothing from it.
        lost = jnp.isnan(pullback.residuals.lse).swapaxes(1, 2)[..., None]
        gradients["query"] = jnp.where(lost, jnp.nan, gradients["query"])
    return {name: gradients[name] for name in sorted(wanted)}


def _operands(pullback: Pullback, spec: HopperSpec, tile: BackwardTile) -> tuple[Operands, jax.Array]:
    """Returns the kernel's operands, padded to whole tiles if they have one element per row; and <do, o>, [B, H, T]."""
    record, lse = pullback.record, pullback.residuals.lse
    cotangent = pullback.cotangent.astype(spec.dtype)
    delta = cotangent.astype(jnp.float32) * pullback.output.astype(jnp.float32)
    if spec.segments:  # that of padding has to be finite
        delta = without_padding(delta, record.q_segment_ids)
    delta = jnp.sum(delta, axis=-1).swapaxes(1, 2)
    padding = ((0, 0), (0, 0), (0, -spec.queries % tile.queries))
    # A row that attends to nothing has weights of exp2(-inf). Scores are masked before the exponential, so a shift of
    # NaN would give the keys of other segments a weight of NaN, too.
    shift = jnp.where((lse == -jnp.inf) | jnp.isnan(lse), jnp.inf, lse * LOG2E)
    operands = {"q": whole(record.query, tile.queries), "do": whole(cotangent, tile.queries)}
    operands |= {"k": whole(record.key, WGMMA_M), "v": whole(record.value, WGMMA_M)}
    # Infinity: weights of rows past the end are exp2(-inf) = 0.
    operands["shift"] = jnp.pad(shift, padding, constant_values=jnp.inf)
    # Dropout's scale is applied to the gradients at the end.
    operands["delta"] = jnp.pad(-_less_lse_cotangent(delta, pullback, spec) / spec.dropout_scale, padding)
    operands |= numbers(record, spec, tile.queries, tile.keys)
    if spec.segments:
        operands["q_ids"] = padded_ids(record.q_segment_ids, tile.queries, -1)
        operands["k_ids"] = padded_ids(record.kv_segment_ids, tile.keys, -2)
    return operands, delta


def _less_lse_cotangent(delta: jax.Array, pullback: Pullback, spec: HopperSpec) -> jax.Array:
    """Returns the kernel's delta, finite for padding too."""
    if pullback.lse_cotangent is None:
        return delta
    delta, ids = less_lse_cotangent(delta, pullback), pullback.record.q_segment_ids
    return jnp.where(ids[:, None] >= 0, delta, 0) if spec.segments else delta


def _gradients(
    spec: HopperSpec, tile: BackwardTile, operands: Operands, record: TiledAttention
) -> dict[str, jax.Array]:
    """Returns gradients of queries, keys and values."""
    ids = (operands["q_ids"], operands["k_ids"]) if spec.segments else None
    if spec.pattern:
        lists, ranges = query_lists(padding_as_segments(record), tile.queries, tile.keys)
        operands, first = operands | lists, lists["first"]
    else:
        ranges = query_block_ranges(spec, ids, tile.queries, tile.keys)
        first = first_adders(ranges, tiles(spec.queries, tile.queries))
        operands = operands | {"table": jnp.asarray(ranges), "first": jnp.asarray(first)}
    plan, by_head = _plan(ranges, spec, tile), _by_head(ranges, spec, tile)
    run = functools.partial(_run, spec, tile, plan, by_head)
    dk, dv, dq = in_rows(run, operands, spec.batch)
    dq = dq[:, : spec.queries] * (spec.scale * spec.dropout_scale)
    # Query blocks that no key tile adds to were never written.
    has_adder = first < ranges.shape[-2]
    if not (isinstance(has_adder, np.ndarray) and has_adder.all()):
        some = jnp.repeat(jnp.asarray(has_adder), tile.queries, axis=-1)[..., : spec.queries]
        some = some.swapaxes(1, 2)[..., None] if some.ndim == 3 else some[:, :, None, None]
        dq = jnp.where(some, dq, 0)
    return {"query": dq.astype(spec.dtype), "key": dk[:, : spec.keys], "value": dv[:, : spec.keys]}


def _plan(ranges: Any, spec: HopperSpec, tile: BackwardTile) -> Callable[[int], tile_scheduler.TileSchedule]:
    """Returns the tile schedule for a number of batch rows.

    There is a block on every multiprocessor, and they start evenly spaced over the steps of a head: as many heads are
    processed together that two blocks of a head start some query blocks apart. Under a causal mask, where later blocks
    are shorter, this needs a folded list. The queries of that many heads are then in use at the same time, and have to
    stay in L2.
    """
    count = ranges.shape[-2]
    lengths = np.full((1, count), max(count / SHORT, 8))
    if isinstance(ranges, np.ndarray):
        lengths = (ranges[..., 3] - ranges[..., 0]).reshape(-1, count)
    mean, half = lengths.mean() * spec.group_size, lengths.shape[1] // 2
    fitting = tile_scheduler.CACHE / (spec.group_size * spec.queries * tile.row_bytes(spec))
    falling = spec.left is None and not spec.pattern and lengths[:, :half].sum() > 1.5 * lengths[:, half:].sum()
    folded = falling and fitting > 0.75
    heads_needed = (
        1 if spec.pattern else math.ceil(BLOCKS_BETWEEN * tile_scheduler.multiprocessors() / (mean * tile.members))
    )
    together = round(fitting) if folded else max(int(fitting), heads_needed)

    def plan(batch: int) -> tile_scheduler.TileSchedule:
        blocks = tile_scheduler.multiprocessors() // tile.members
        all_tiles, queries = batch * spec.kv_heads * count, tiles(spec.queries, tile.queries)
        made = tile_scheduler.make_plan(
            count,
            batch=batch,
            heads=spec.kv_heads,
            reverse=spec.pattern,
            head_bytes=tile_scheduler.CACHE // together,
            group=1,
            persistent=False,
            split=WHOLE if spec.masked else make_split(all_tiles, blocks, queries, spec.group_size),
        )
        return dataclasses.replace(made, folded=folded)

    return plan


def _by_head(ranges: Any, spec: HopperSpec, tile: BackwardTile) -> bool:
    """Returns whether a block loops over a head's query blocks before the next head's.

    With a window, the next thread block reaches a query block later by the steps that the window has moved, times the
    heads of the loop. The query blocks and dq of all thread blocks in between would have to stay in the L2 cache.
    """
    if spec.group_size > 1 and spec.pattern and ranges.shape[1] > 1:  # each head has its own lists
        return True
    if spec.group_size == 1 or not isinstance(ranges, np.ndarray) or spec.pattern or ranges.shape[1] == 1:
        return False
    moved = (ranges[0, -1, 3] - ranges[0, 0, 3]) / (ranges.shape[1] - 1)
    between = (BLOCKS_BETWEEN + moved * spec.group_size) * tile_scheduler.multiprocessors()
    return between * tile.queries * tile.row_bytes(spec) > 2 * tile_scheduler.CACHE


def _run(
    spec: HopperSpec,
    tile: BackwardTile,
    make_plan: Callable[[int], tile_scheduler.TileSchedule],
    by_head: bool,
    operands: Operands,
    batch: int,
) -> tuple[jax.Array, ...]:
    """Returns gradients of keys and of values, and unscaled gradients of queries."""
    plan = make_plan(batch)
    places = batch * spec.heads * operands["first"].shape[-1] * tile.pieces * tile.members

    def body(given: Operands, made: Any, buffers: Any) -> None:
        # Semaphores are zero when a kernel starts.
        blocks_added = pl.get_global(plgpu.SemaphoreType.REGULAR((places,)))
        member = lax.axis_index(clusters.AXIS) if tile.wide else 0
        buffers = _with_views(buffers) if "rows" in buffers else buffers
        backward_kernel(
            Call(spec, tile, plan, by_head, given, made, tile_scheduler.counter(), blocks_added, buffers, member)
        )

    shapes = {"k": spec.dtype, "v": spec.dtype, "q": jnp.float32}
    outputs = [jax.ShapeDtypeStruct((batch, *operands[name].shape[1:]), dtype) for name, dtype in shapes.items()]
    if plan.split.tiles:
        parts = (plan.split.tiles * plan.split.parts, tile.keys)
        outputs += [jax.ShapeDtypeStruct((*parts, size), jnp.float32) for size in (spec.head_dim, spec.value_dim)]
    cluster = {clusters.AXIS: tile.members} if tile.wide else None
    made = launch(body, operands, outputs, _scratch(spec, tile, operands), plan.blocks, WARPGROUPS, cluster)
    return _with_split(plan, *made) if plan.split.tiles else made


def _with_split(
    plan: tile_scheduler.TileSchedule, dk: jax.Array, dv: jax.Array, dq: jax.Array, *parts: jax.Array
) -> tuple[jax.Array, ...]:
    """Returns gradients, with those of the split tiles summed from their parts."""
    place = tile_scheduler.split_rows(plan, parts[0].shape[1])

    def put(gradient: jax.Array, sums: jax.Array) -> jax.Array:
        # A fixed order, unlike atomics: results are reproducible bit for bit.
        sums = sums.reshape(plan.split.tiles, plan.split.parts, *sums.shape[1:]).sum(axis=1)
        # Rows of a partial tile that are past the end are dropped.
        return gradient.at[place].set(sums.astype(gradient.dtype), mode="drop", unique_indices=True)

    return put(dk, parts[0]), put(dv, parts[1]), dq


def _scratch(spec: HopperSpec, tile: BackwardTile, operands: Operands) -> dict[str, Any]:
    """Returns shared memory and mbarriers, by the kernel's names."""
    made: dict[str, Any] = {
        "k": matrix((tile.parts * tile.owners + tile.shared_parts, WGMMA_M, tile.part), spec.dtype, tile.line("k")),
        "v": matrix((tile.owners, WGMMA_M, spec.value_dim), spec.dtype),
        # Two steps, with the size of a tile of scores each.
        "ds": matrix((2 * tile.keys * tile.queries // WGMMA_M**2, WGMMA_M, WGMMA_M), spec.dtype, tile.line("ds")),
        "dq": plgpu.SMEM(
            (WARPGROUPS, WGMMA_M, tile.dq_columns),
            jnp.float32,
            # 32 float32 columns are a row of the 128-byte swizzle: stores by lanes have no bank conflicts.
            transforms=(plgpu.TilingTransform((8, 32)), plgpu.SwizzleTransform(128)),
        ),
    }
    for name, stages in tile.stages.items():
        size = spec.head_dim if name == "q" else spec.value_dim
        made[name] = matrix((stages, tile.queries, size), spec.dtype, tile.line(name))
        made[f"{name}_full"] = plgpu.Barrier(num_arrivals=1 + len(tile.extras(spec, name)), num_barriers=stages)
        made[f"{name}_free"] = _freed(tile, stages)
    copies = tile.owners * (tile.parts + 1 + len(tile.extras(spec, "k"))) + tile.shared_parts
    made["kv_full"] = plgpu.Barrier(num_arrivals=copies)
    made["dq_done"] = plgpu.Barrier(num_arrivals=tile.makers)
    made["dq_full"] = plgpu.Barrier(num_arrivals=tile.makers, num_barriers=tile.pieces * tile.adders)
    made["dq_free"] = plgpu.Barrier(num_arrivals=1, num_barriers=tile.pieces)
    return made | (_pair_scratch(tile) if tile.wide else _single_scratch(spec, tile, operands))


def _single_scratch(spec: HopperSpec, tile: BackwardTile, operands: Operands) -> dict[str, Any]:
    """Returns the scratch memory of blocks without a cluster."""
    number_full = {"number_full": plgpu.Barrier(num_arrivals=1)}
    if tile.register_bound:
        return _packed_scratch(tile) | number_full | {"ds_full": plgpu.Barrier(num_arrivals=tile.makers)}
    made: dict[str, Any] = {"number": plgpu.SMEM((1,), jnp.int32)} | number_full
    for name in tile.extras(spec, "q"):
        made[name] = plgpu.SMEM((tile.depth, tile.queries), operands[name].dtype)
    for name in tile.extras(spec, "k"):
        made[name] = plgpu.SMEM((tile.owners, WGMMA_M), operands[name].dtype)
    return made | {"ds_full": plgpu.Barrier(num_arrivals=tile.makers)}


def _pair_scratch(tile: BackwardTile) -> dict[str, Any]:
    """Returns scratch memory of the blocks of a cluster."""
    return _packed_scratch(tile) | {"weights_full": plgpu.Barrier(num_arrivals=1), "ds_free": _freed(tile, 2)}


def _packed_scratch(tile: BackwardTile) -> dict[str, Any]:
    """Returns the elements per row packed into one array, for lack of memory: every array is aligned to 1024 bytes."""
    return {
        "rows": plgpu.SMEM((2, tile.depth, tile.queries), jnp.float32),
        "words": plgpu.SMEM((tile.depth + 1, tile.queries), jnp.int32),
    }


def _with_views(buffers: dict[str, Any]) -> dict[str, Any]:
    """Returns named views of packed arrays. After the ids of queries is a row for `pairs`, or the tile's index."""
    rows, words = buffers["rows"], buffers["words"]
    last = words.at[words.shape[0] - 1]
    return buffers | {"shift": rows.at[0], "delta": rows.at[1], "q_ids": words, "pair": last, "number": last}


def _freed(tile: BackwardTile, count: int) -> Any:
    """Returns mbarriers at which all consumer warpgroups arrive, of both members of a cluster."""
    if tile.wide:
        return plgpu.ClusterBarrier(collective_axes=(clusters.AXIS,), num_arrivals=WARPGROUPS, num_barriers=count)
    return plgpu.Barrier(num_arrivals=WARPGROUPS, num_barriers=count)
