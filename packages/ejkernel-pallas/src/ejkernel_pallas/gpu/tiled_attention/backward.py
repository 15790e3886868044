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
from ejkernel_pallas.gpu.hopper.launch import launch, matrix, pad_rows
from ejkernel_pallas.gpu.hopper.sizes import WGMMA_M
from ejkernel_pallas.gpu.hopper.split_tiles import NO_SPLIT, split_tail_wave
from ejkernel_pallas.gpu.tiled_attention.config import WARPGROUPS, BackwardTile, HopperBackward, backward_tile
from ejkernel_pallas.gpu.tiled_attention.kernels.backward_call import Call
from ejkernel_pallas.gpu.tiled_attention.kernels.dropout import dropout_key_operands
from ejkernel_pallas.gpu.tiled_attention.kernels.flash_backward import backward_kernel
from ejkernel_pallas.gpu.tiled_attention.plan.block_map import (
    pad_segment_ids,
    query_block_ranges,
    tiles,
    zero_padded_tokens,
)
from ejkernel_pallas.gpu.tiled_attention.plan.dq_order import find_first_adders
from ejkernel_pallas.gpu.tiled_attention.plan.pattern import query_lists
from ejkernel_pallas.gpu.tiled_attention.spec import (
    HopperSpec,
    make_spec,
)

Operands = dict[str, jax.Array]
MIN_BLOCK_DISTANCE = 2
"""The smallest distance, in query blocks, between the starts of two thread blocks of a head."""
DEFAULT_STEPS_DIVISOR = 32
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
    grad_fields, spec = pullback.grad_fields, make_spec(pullback.record)
    tile = backward_tile(params, spec)
    operands, delta = _operands(pullback, spec, tile)
    gradients: dict[str, jax.Array] = {}
    if grad_fields & {"query", "key", "value"}:
        gradients = _gradients(spec, tile, operands, pullback.record)
    if "softmax_aux" in grad_fields:
        gradients["softmax_aux"] = sinks_gradient(pullback, delta)
    if spec.segments and "query" in grad_fields:
        # The query's gradient is NaN if a row was not finite; the keys that it attends to get nothing from it.
        is_nan_row = jnp.isnan(pullback.residuals.lse).swapaxes(1, 2)[..., None]
        gradients["query"] = jnp.where(is_nan_row, jnp.nan, gradients["query"])
    return {name: gradients[name] for name in sorted(grad_fields)}


def _operands(pullback: Pullback, spec: HopperSpec, tile: BackwardTile) -> tuple[Operands, jax.Array]:
    """Returns the kernel's operands, padded to whole tiles if they have one element per row; and <do, o>, [B, H, T]."""
    record, lse = pullback.record, pullback.residuals.lse
    cotangent = pullback.cotangent.astype(spec.dtype)
    delta = cotangent.astype(jnp.float32) * pullback.output.astype(jnp.float32)
    if spec.segments:  # that of padding has to be finite
        delta = zero_padded_tokens(delta, record.q_segment_ids)
    delta = jnp.sum(delta, axis=-1).swapaxes(1, 2)
    row_padding = ((0, 0), (0, 0), (0, -spec.queries % tile.queries))
    # A row that attends to nothing has weights of exp2(-inf). Scores are masked before the exponential, so a shift of
    # NaN would give the keys of other segments a weight of NaN, too.
    shift = jnp.where((lse == -jnp.inf) | jnp.isnan(lse), jnp.inf, lse * LOG2E)
    operands = {"q": pad_rows(record.query, tile.queries), "do": pad_rows(cotangent, tile.queries)}
    operands |= {"k": pad_rows(record.key, WGMMA_M), "v": pad_rows(record.value, WGMMA_M)}
    # Infinity: weights of rows past the end are exp2(-inf) = 0.
    operands["shift"] = jnp.pad(shift, row_padding, constant_values=jnp.inf)
    # Dropout's scale is applied to the gradients at the end.
    operands["delta"] = jnp.pad(-_subtract_lse_cotangent(delta, pullback, spec) / spec.dropout_scale, row_padding)
    operands |= dropout_key_operands(record, spec, tile.queries, tile.keys)
    if spec.segments:
        operands["q_ids"] = pad_segment_ids(record.q_segment_ids, tile.queries, -1)
        operands["k_ids"] = pad_segment_ids(record.kv_segment_ids, tile.keys, -2)
    return operands, delta


def _subtract_lse_cotangent(delta: jax.Array, pullback: Pullback, spec: HopperSpec) -> jax.Array:
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
        block_lists, block_ranges = query_lists(padding_as_segments(record), tile.queries, tile.keys)
        operands, first = operands | block_lists, block_lists["first"]
    else:
        block_ranges = query_block_ranges(spec, ids, tile.queries, tile.keys)
        first = find_first_adders(block_ranges, tiles(spec.queries, tile.queries))
        operands = operands | {"table": jnp.asarray(block_ranges), "first": jnp.asarray(first)}
    plan, loops_by_head = _plan(block_ranges, spec, tile), _should_loop_by_head(block_ranges, spec, tile)
    run = functools.partial(_run, spec, tile, plan, loops_by_head)
    dk, dv, dq = in_rows(run, operands, spec.batch)
    dq = dq[:, : spec.queries] * (spec.scale * spec.dropout_scale)
    # Query blocks that no key tile adds to were never written.
    has_adder = first < block_ranges.shape[-2]
    if not (isinstance(has_adder, np.ndarray) and has_adder.all()):
        has_adder_by_query = jnp.repeat(jnp.asarray(has_adder), tile.queries, axis=-1)[..., : spec.queries]
        has_adder_by_query = (
            has_adder_by_query.swapaxes(1, 2)[..., None]
            if has_adder_by_query.ndim == 3
            else has_adder_by_query[:, :, None, None]
        )
        dq = jnp.where(has_adder_by_query, dq, 0)
    return {"query": dq.astype(spec.dtype), "key": dk[:, : spec.keys], "value": dv[:, : spec.keys]}


def _plan(block_ranges: Any, spec: HopperSpec, tile: BackwardTile) -> Callable[[int], tile_scheduler.TileSchedule]:
    """Returns the tile schedule for a number of batch rows.

    There is a block on every multiprocessor, and they start evenly spaced over the steps of a head: as many heads are
    processed together that two blocks of a head start some query blocks apart. Under a causal mask, where later blocks
    are shorter, this needs a folded list. The queries of that many heads are then in use at the same time, and have to
    stay in L2.
    """
    count = block_ranges.shape[-2]
    lengths = np.full((1, count), max(count / DEFAULT_STEPS_DIVISOR, 8))
    if isinstance(block_ranges, np.ndarray):
        lengths = (block_ranges[..., 3] - block_ranges[..., 0]).reshape(-1, count)
    mean_steps, half = lengths.mean() * spec.group_size, lengths.shape[1] // 2
    heads_that_fit = tile_scheduler.L2_BYTES / (spec.group_size * spec.queries * tile.device_bytes_per_query(spec))
    steps_decrease = spec.left is None and not spec.pattern and lengths[:, :half].sum() > 1.5 * lengths[:, half:].sum()
    folded = steps_decrease and heads_that_fit > 0.75
    heads_needed = (
        1
        if spec.pattern
        else math.ceil(MIN_BLOCK_DISTANCE * tile_scheduler.multiprocessors() / (mean_steps * tile.blocks_per_cluster))
    )
    heads_in_l2 = round(heads_that_fit) if folded else max(int(heads_that_fit), heads_needed)

    def make_schedule(batch: int) -> tile_scheduler.TileSchedule:
        blocks = tile_scheduler.multiprocessors() // tile.blocks_per_cluster
        num_tiles, queries = batch * spec.kv_heads * count, tiles(spec.queries, tile.queries)
        schedule = tile_scheduler.make_plan(
            count,
            batch=batch,
            heads=spec.kv_heads,
            reverse=spec.pattern,
            head_bytes=tile_scheduler.L2_BYTES // heads_in_l2,
            group=1,
            persistent=False,
            split=NO_SPLIT if spec.masked else split_tail_wave(num_tiles, blocks, queries, spec.group_size),
        )
        return dataclasses.replace(schedule, folded=folded)

    return make_schedule


def _should_loop_by_head(block_ranges: Any, spec: HopperSpec, tile: BackwardTile) -> bool:
    """Returns whether a block loops over a head's query blocks before the next head's.

    With a window, the next thread block reaches a query block later by the steps that the window has moved, times the
    heads of the loop. The query blocks and dq of all thread blocks in between would have to stay in the L2 cache.
    """
    if spec.group_size > 1 and spec.pattern and block_ranges.shape[1] > 1:  # each head has its own lists
        return True
    if spec.group_size == 1 or not isinstance(block_ranges, np.ndarray) or spec.pattern or block_ranges.shape[1] == 1:
        return False
    window_shift = (block_ranges[0, -1, 3] - block_ranges[0, 0, 3]) / (block_ranges.shape[1] - 1)
    blocks_between = (MIN_BLOCK_DISTANCE + window_shift * spec.group_size) * tile_scheduler.multiprocessors()
    return blocks_between * tile.queries * tile.device_bytes_per_query(spec) > 2 * tile_scheduler.L2_BYTES


def _run(
    spec: HopperSpec,
    tile: BackwardTile,
    make_plan: Callable[[int], tile_scheduler.TileSchedule],
    loops_by_head: bool,
    operands: Operands,
    batch: int,
) -> tuple[jax.Array, ...]:
    """Returns gradients of keys and of values, and unscaled gradients of queries."""
    plan = make_plan(batch)
    num_semaphores = batch * spec.heads * operands["first"].shape[-1] * tile.dq_pieces * tile.blocks_per_cluster

    def body(operand_refs: Operands, output_refs: Any, buffers: Any) -> None:
        # Semaphores are zero when a kernel starts.
        dq_add_counts = pl.get_global(plgpu.SemaphoreType.REGULAR((num_semaphores,)))
        member = lax.axis_index(clusters.CLUSTER_AXIS) if tile.is_wide else 0
        buffers = _add_row_data_views(buffers) if "rows" in buffers else buffers
        backward_kernel(
            Call(
                spec,
                tile,
                plan,
                loops_by_head,
                operand_refs,
                output_refs,
                tile_scheduler.make_tile_counter(),
                dq_add_counts,
                buffers,
                member,
            )
        )

    shapes = {"k": spec.dtype, "v": spec.dtype, "q": jnp.float32}
    outputs = [jax.ShapeDtypeStruct((batch, *operands[name].shape[1:]), dtype) for name, dtype in shapes.items()]
    if plan.split.tiles:
        parts = (plan.split.tiles * plan.split.parts, tile.keys)
        outputs += [jax.ShapeDtypeStruct((*parts, size), jnp.float32) for size in (spec.head_dim, spec.value_dim)]
    cluster = {clusters.CLUSTER_AXIS: tile.blocks_per_cluster} if tile.is_wide else None
    outputs_and_parts = launch(
        body, operands, outputs, _scratch(spec, tile, operands), plan.blocks, WARPGROUPS, cluster
    )
    return _sum_split_tiles(plan, *outputs_and_parts) if plan.split.tiles else outputs_and_parts


def _sum_split_tiles(
    plan: tile_scheduler.TileSchedule, dk: jax.Array, dv: jax.Array, dq: jax.Array, *parts: jax.Array
) -> tuple[jax.Array, ...]:
    """Returns gradients, with those of the split tiles summed from their parts."""
    place = tile_scheduler.locate_split_rows(plan, parts[0].shape[1])

    def store_sums(gradient: jax.Array, sums: jax.Array) -> jax.Array:
        # A fixed order, unlike atomics: results are reproducible bit for bit.
        sums = sums.reshape(plan.split.tiles, plan.split.parts, *sums.shape[1:]).sum(axis=1)
        # Rows of a partial tile that are past the end are dropped.
        return gradient.at[place].set(sums.astype(gradient.dtype), mode="drop", unique_indices=True)

    return store_sums(dk, parts[0]), store_sums(dv, parts[1]), dq


def _scratch(spec: HopperSpec, tile: BackwardTile, operands: Operands) -> dict[str, Any]:
    """Returns shared memory and mbarriers, by the kernel's names."""
    buffers: dict[str, Any] = {
        "k": matrix(
            (tile.key_parts * tile.key_tiles_per_block + tile.peer_key_parts, WGMMA_M, tile.key_part_columns),
            spec.dtype,
            tile.swizzle_bytes("k"),
        ),
        "v": matrix((tile.key_tiles_per_block, WGMMA_M, spec.value_dim), spec.dtype),
        # Two steps, with the size of a tile of scores each.
        "ds": matrix(
            (2 * tile.keys * tile.queries // WGMMA_M**2, WGMMA_M, WGMMA_M), spec.dtype, tile.swizzle_bytes("ds")
        ),
        "dq": plgpu.SMEM(
            (WARPGROUPS, WGMMA_M, tile.dq_columns),
            jnp.float32,
            # 32 float32 columns are a row of the 128-byte swizzle: stores by lanes have no bank conflicts.
            transforms=(plgpu.TilingTransform((8, 32)), plgpu.SwizzleTransform(128)),
        ),
    }
    for name, stages in tile.stages.items():
        size = spec.head_dim if name == "q" else spec.value_dim
        buffers[name] = matrix((stages, tile.queries, size), spec.dtype, tile.swizzle_bytes(name))
        buffers[f"{name}_full"] = plgpu.Barrier(num_arrivals=1 + len(tile.row_arrays(spec, name)), num_barriers=stages)
        buffers[f"{name}_free"] = _free_barriers(tile, stages)
    copies = tile.key_tiles_per_block * (tile.key_parts + 1 + len(tile.row_arrays(spec, "k"))) + tile.peer_key_parts
    buffers["kv_full"] = plgpu.Barrier(num_arrivals=copies)
    buffers["dq_done"] = plgpu.Barrier(num_arrivals=tile.warpgroups_per_piece)
    buffers["dq_full"] = plgpu.Barrier(
        num_arrivals=tile.warpgroups_per_piece, num_barriers=tile.dq_pieces * tile.adder_warps
    )
    buffers["dq_free"] = plgpu.Barrier(num_arrivals=1, num_barriers=tile.dq_pieces)
    return buffers | (_cluster_scratch(tile) if tile.is_wide else _single_scratch(spec, tile, operands))


def _single_scratch(spec: HopperSpec, tile: BackwardTile, operands: Operands) -> dict[str, Any]:
    """Returns the scratch memory of blocks without a cluster."""
    number_full = {"number_full": plgpu.Barrier(num_arrivals=1)}
    if tile.register_bound:
        return (
            _row_data_scratch(tile) | number_full | {"ds_full": plgpu.Barrier(num_arrivals=tile.warpgroups_per_piece)}
        )
    buffers: dict[str, Any] = {"number": plgpu.SMEM((1,), jnp.int32)} | number_full
    for name in tile.row_arrays(spec, "q"):
        buffers[name] = plgpu.SMEM((tile.query_stages, tile.queries), operands[name].dtype)
    for name in tile.row_arrays(spec, "k"):
        buffers[name] = plgpu.SMEM((tile.key_tiles_per_block, WGMMA_M), operands[name].dtype)
    return buffers | {"ds_full": plgpu.Barrier(num_arrivals=tile.warpgroups_per_piece)}


def _cluster_scratch(tile: BackwardTile) -> dict[str, Any]:
    """Returns scratch memory of the blocks of a cluster."""
    return _row_data_scratch(tile) | {"weights_full": plgpu.Barrier(num_arrivals=1), "ds_free": _free_barriers(tile, 2)}


def _row_data_scratch(tile: BackwardTile) -> dict[str, Any]:
    """Returns the elements per row packed into one array, for lack of memory: every array is aligned to 1024 bytes."""
    return {
        "rows": plgpu.SMEM((2, tile.query_stages, tile.queries), jnp.float32),
        "words": plgpu.SMEM((tile.query_stages + 1, tile.queries), jnp.int32),
    }


def _add_row_data_views(buffers: dict[str, Any]) -> dict[str, Any]:
    """Returns named views of packed arrays. After the ids of queries is a row for `pairs`, or the tile's index."""
    rows, words = buffers["rows"], buffers["words"]
    last = words.at[words.shape[0] - 1]
    return buffers | {"shift": rows.at[0], "delta": rows.at[1], "q_ids": words, "pair": last, "number": last}


def _free_barriers(tile: BackwardTile, count: int) -> Any:
    """Returns mbarriers at which all consumer warpgroups arrive, of both members of a cluster."""
    if tile.is_wide:
        return plgpu.ClusterBarrier(
            collective_axes=(clusters.CLUSTER_AXIS,), num_arrivals=WARPGROUPS, num_barriers=count
        )
    return plgpu.Barrier(num_arrivals=WARPGROUPS, num_barriers=count)
