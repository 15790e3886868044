"""Backward pass of tiled softmax attention on Hopper.

With p = exp(s - lse), do and dlse the cotangents of output and lse, and delta_i = <do_i, o_i> - dlse_i:

    dv_j    = sum_i dropout_ij p_ij do_i
    ds_ij   = p_ij (dropout_ij <do_i, v_j> - delta_i), through score_mod and the soft cap
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
from ejkernel.families.tiled_attention import TiledAttention, sinks_gradient, subtract_lse_cotangent
from ejkernel.families.tiled_attention.score_terms import functions_as_arguments
from ejkernel.families.tiled_attention.tile_pairs import padding_as_segments
from ejkernel.planning.batch_rows import run_with_batch_rows
from ejkernel.types.pullback import Pullback
from ejkernel_pallas.gpu.hopper import clusters, tile_scheduler
from ejkernel_pallas.gpu.hopper.launch import launch, pad_rows, wgmma_operand_smem
from ejkernel_pallas.gpu.hopper.sizes import WGMMA_M
from ejkernel_pallas.gpu.hopper.split_tiles import NO_SPLIT, split_tail_wave
from ejkernel_pallas.gpu.tiled_attention.config import (
    BACKWARD_CONSUMER_WARPGROUPS,
    BackwardTile,
    HopperBackward,
    backward_tile,
)
from ejkernel_pallas.gpu.tiled_attention.kernels.backward_call import Call
from ejkernel_pallas.gpu.tiled_attention.kernels.dropout import dropout_key_operands
from ejkernel_pallas.gpu.tiled_attention.kernels.flash_backward import backward_kernel
from ejkernel_pallas.gpu.tiled_attention.kernels.pair_functions import pair_operands
from ejkernel_pallas.gpu.tiled_attention.plan.block_map import (
    num_tiles,
    pad_segment_ids,
    query_block_ranges,
    zero_padded_tokens,
)
from ejkernel_pallas.gpu.tiled_attention.plan.dq_order import find_first_dq_adders
from ejkernel_pallas.gpu.tiled_attention.plan.pattern import query_block_lists
from ejkernel_pallas.gpu.tiled_attention.spec import (
    HopperSpec,
    make_spec,
)

OperandsByName = dict[str, jax.Array]
MIN_QUERY_BLOCKS_BETWEEN_STARTS = 2
"""The smallest distance, in query blocks, between the starts of two thread blocks of a head."""
ASSUMED_SEGMENTS_PER_ROW = 32
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
    pullback = dataclasses.replace(pullback, record=functions_as_arguments(pullback.record))
    grad_fields, spec = pullback.grad_fields, make_spec(pullback.record)
    tile = backward_tile(params, spec)
    operands, delta = _make_operands(pullback, spec, tile)
    gradients: dict[str, jax.Array] = {}
    if grad_fields & {"query", "key", "value"}:
        gradients = _compute_gradients(spec, tile, operands, pullback.record)
    if "softmax_aux" in grad_fields:
        gradients["softmax_aux"] = sinks_gradient(pullback, delta)
    if spec.has_segments and "query" in grad_fields:
        # The query's gradient is NaN if a row was not finite; the keys that it attends to get nothing from it.
        is_nan_row = jnp.isnan(pullback.residuals.lse).swapaxes(1, 2)[..., None]
        gradients["query"] = jnp.where(is_nan_row, jnp.nan, gradients["query"])
    return {name: gradients[name] for name in sorted(grad_fields)}


def _make_operands(pullback: Pullback, spec: HopperSpec, tile: BackwardTile) -> tuple[OperandsByName, jax.Array]:
    """Returns the kernel's operands, padded to whole tiles if they have one element per row; and <do, o>, [B, H, T]."""
    record, lse = pullback.record, pullback.residuals.lse
    cotangent = pullback.cotangent.astype(spec.dtype)
    delta = cotangent.astype(jnp.float32) * pullback.output.astype(jnp.float32)
    if spec.has_segments:  # that of padding has to be finite
        delta = zero_padded_tokens(delta, record.q_segment_ids)
    delta = jnp.sum(delta, axis=-1).swapaxes(1, 2)
    row_padding = ((0, 0), (0, 0), (0, -spec.q_len % tile.block_q))
    # A row that attends to nothing has weights of exp2(-inf). Scores are masked before the exponential, so a shift of
    # NaN would give the keys of other segments a weight of NaN, too.
    shift = jnp.where((lse == -jnp.inf) | jnp.isnan(lse), jnp.inf, lse * LOG2E)
    operands = {"q": pad_rows(record.query, tile.block_q), "do": pad_rows(cotangent, tile.block_q)}
    operands |= {"k": pad_rows(record.key, WGMMA_M), "v": pad_rows(record.value, WGMMA_M)}
    # Infinity: weights of rows past the end are exp2(-inf) = 0.
    operands["shift"] = jnp.pad(shift, row_padding, constant_values=jnp.inf)
    # Dropout's scale is applied to the gradients at the end.
    operands["delta"] = jnp.pad(-_subtract_lse_cotangent(delta, pullback, spec) / spec.dropout_scale, row_padding)
    operands |= dropout_key_operands(record, spec, tile.block_q, tile.block_kv) | pair_operands(record, spec)
    if spec.has_segments:
        operands["q_ids"] = pad_segment_ids(record.q_segment_ids, tile.block_q, -1)
        operands["k_ids"] = pad_segment_ids(record.kv_segment_ids, tile.block_kv, -2)
    return operands, delta


def _subtract_lse_cotangent(delta: jax.Array, pullback: Pullback, spec: HopperSpec) -> jax.Array:
    """Returns the kernel's delta, finite for padding too."""
    if pullback.lse_cotangent is None:
        return delta
    delta, ids = subtract_lse_cotangent(delta, pullback), pullback.record.q_segment_ids
    return jnp.where(ids[:, None] >= 0, delta, 0) if spec.has_segments else delta


def _compute_gradients(
    spec: HopperSpec, tile: BackwardTile, operands: OperandsByName, record: TiledAttention
) -> dict[str, jax.Array]:
    """Returns gradients of queries, keys and values."""
    ids = (operands["q_ids"], operands["k_ids"]) if spec.has_segments else None
    if spec.has_block_lists:
        block_lists, block_ranges = query_block_lists(padding_as_segments(record), tile.block_q, tile.block_kv)
        operands, first = operands | block_lists, block_lists["first"]
    else:
        block_ranges = query_block_ranges(spec, ids, tile.block_q, tile.block_kv)
        first = find_first_dq_adders(block_ranges, num_tiles(spec.q_len, tile.block_q))
        operands = operands | {"table": jnp.asarray(block_ranges), "first": jnp.asarray(first)}
    plan, loops_by_head = _tile_schedule_maker(block_ranges, spec, tile), _should_loop_by_head(block_ranges, spec, tile)
    run = functools.partial(_run_kernel, spec, tile, plan, loops_by_head)
    dk, dv, dq = run_with_batch_rows(run, operands, spec.batch_size)
    dq = dq[:, : spec.q_len] * (spec.scale * spec.dropout_scale)
    # Query blocks that no key tile adds to were never written.
    has_adder = first < block_ranges.shape[-2]
    if not (isinstance(has_adder, np.ndarray) and has_adder.all()):
        has_adder_by_query = jnp.repeat(jnp.asarray(has_adder), tile.block_q, axis=-1)[..., : spec.q_len]
        has_adder_by_query = (
            has_adder_by_query.swapaxes(1, 2)[..., None]
            if has_adder_by_query.ndim == 3
            else has_adder_by_query[:, :, None, None]
        )
        dq = jnp.where(has_adder_by_query, dq, 0)
    return {"query": dq.astype(spec.dtype), "key": dk[:, : spec.kv_len], "value": dv[:, : spec.kv_len]}


def _tile_schedule_maker(
    block_ranges: Any, spec: HopperSpec, tile: BackwardTile
) -> Callable[[int], tile_scheduler.TileSchedule]:
    """Returns the tile schedule for a number of batch rows.

    There is a block on every multiprocessor, and they start evenly spaced over the steps of a head: as many heads are
    processed together that two blocks of a head start some query blocks apart. Under a causal mask, where later blocks
    are shorter, this needs a folded list. The queries of that many heads are then in use at the same time, and have to
    stay in L2.
    """
    count = block_ranges.shape[-2]
    lengths = np.full((1, count), max(count / ASSUMED_SEGMENTS_PER_ROW, 8))
    if isinstance(block_ranges, np.ndarray):
        lengths = (block_ranges[..., 3] - block_ranges[..., 0]).reshape(-1, count)
    mean_steps, half = lengths.mean() * spec.group_size, lengths.shape[1] // 2
    heads_that_fit = tile_scheduler.L2_BYTES_PER_BUNDLE / (
        spec.group_size * spec.q_len * tile.hbm_bytes_per_query(spec)
    )
    steps_decrease = (
        spec.left_window is None
        and not spec.has_block_lists
        and lengths[:, :half].sum() > 1.5 * lengths[:, half:].sum()
    )
    folded = steps_decrease and heads_that_fit > 0.75
    blocks_of_steps = MIN_QUERY_BLOCKS_BETWEEN_STARTS * tile_scheduler.num_multiprocessors()
    heads_needed = 1 if spec.has_block_lists else math.ceil(blocks_of_steps / (mean_steps * tile.blocks_per_cluster))
    heads_in_l2 = round(heads_that_fit) if folded else max(int(heads_that_fit), heads_needed)

    def make_schedule(batch_size: int) -> tile_scheduler.TileSchedule:
        blocks = tile_scheduler.num_multiprocessors() // tile.blocks_per_cluster
        num_key_tiles, query_blocks = batch_size * spec.num_kv_heads * count, num_tiles(spec.q_len, tile.block_q)
        schedule = tile_scheduler.make_tile_schedule(
            count,
            batch_size=batch_size,
            heads_per_batch_row=spec.num_kv_heads,
            reverses_tiles=spec.has_block_lists,
            head_bytes=tile_scheduler.L2_BYTES_PER_BUNDLE // heads_in_l2,
            heads_per_group=1,
            is_persistent=False,
            tail_split=NO_SPLIT
            if spec.may_mask_pairs
            else split_tail_wave(num_key_tiles, blocks, query_blocks, spec.group_size),
        )
        return dataclasses.replace(schedule, interleaves_bundles=folded)

    return make_schedule


def _should_loop_by_head(block_ranges: Any, spec: HopperSpec, tile: BackwardTile) -> bool:
    """Returns whether a block loops over a head's query blocks before the next head's.

    With a window, the next thread block reaches a query block later by the steps that the window has moved, times the
    heads of the loop. The query blocks and dq of all thread blocks in between would have to stay in the L2 cache.
    """
    if spec.group_size > 1 and spec.has_block_lists and block_ranges.shape[1] > 1:  # each head has its own lists
        return True
    if (
        spec.group_size == 1
        or not isinstance(block_ranges, np.ndarray)
        or spec.has_block_lists
        or block_ranges.shape[1] == 1
    ):
        return False
    window_shift = (block_ranges[0, -1, 3] - block_ranges[0, 0, 3]) / (block_ranges.shape[1] - 1)
    blocks_between = (
        MIN_QUERY_BLOCKS_BETWEEN_STARTS + window_shift * spec.group_size
    ) * tile_scheduler.num_multiprocessors()
    return blocks_between * tile.block_q * tile.hbm_bytes_per_query(spec) > 2 * tile_scheduler.L2_BYTES_PER_BUNDLE


def _run_kernel(
    spec: HopperSpec,
    tile: BackwardTile,
    make_schedule: Callable[[int], tile_scheduler.TileSchedule],
    loops_by_head: bool,
    operands: OperandsByName,
    batch_size: int,
) -> tuple[jax.Array, ...]:
    """Returns gradients of keys and of values, and unscaled gradients of queries."""
    plan = make_schedule(batch_size)
    num_semaphores = (
        batch_size * spec.num_heads * operands["first"].shape[-1] * tile.num_dq_pieces * tile.blocks_per_cluster
    )

    def body(operand_refs: OperandsByName, output_refs: Any, buffers: Any) -> None:
        # Semaphores are zero when a kernel starts.
        dq_add_counts = pl.get_global(plgpu.SemaphoreType.REGULAR((num_semaphores,)))
        member = lax.axis_index(clusters.CLUSTER_AXIS) if tile.has_wide_heads else 0
        buffers = _add_query_vector_views(buffers) if "rows" in buffers else buffers
        counter = tile_scheduler.make_tile_counter()
        backward_kernel(
            Call(spec, tile, plan, loops_by_head, operand_refs, output_refs, counter, dq_add_counts, buffers, member)
        )

    shapes = {"k": spec.dtype, "v": spec.dtype, "q": jnp.float32}
    outputs = [jax.ShapeDtypeStruct((batch_size, *operands[name].shape[1:]), dtype) for name, dtype in shapes.items()]
    if plan.tail_split.num_split_tiles:
        parts = (plan.tail_split.num_split_tiles * plan.tail_split.splits_per_tile, tile.block_kv)
        outputs += [jax.ShapeDtypeStruct((*parts, size), jnp.float32) for size in (spec.head_dim, spec.value_dim)]
    cluster = {clusters.CLUSTER_AXIS: tile.blocks_per_cluster} if tile.has_wide_heads else None
    outputs_and_parts = launch(
        body, operands, outputs, _scratch(spec, tile, operands), plan.num_blocks, BACKWARD_CONSUMER_WARPGROUPS, cluster
    )
    return _sum_split_tiles(plan, *outputs_and_parts) if plan.tail_split.num_split_tiles else outputs_and_parts


def _sum_split_tiles(
    schedule: tile_scheduler.TileSchedule, dk: jax.Array, dv: jax.Array, dq: jax.Array, *split_gradients: jax.Array
) -> tuple[jax.Array, ...]:
    """Returns gradients, with those of the split tiles summed from their parts."""
    place = tile_scheduler.output_indices_of_split_tiles(schedule, split_gradients[0].shape[1])

    def store_summed_split_gradients(gradient: jax.Array, sums: jax.Array) -> jax.Array:
        # A fixed order, unlike atomics: results are reproducible bit for bit.
        sums = sums.reshape(
            schedule.tail_split.num_split_tiles, schedule.tail_split.splits_per_tile, *sums.shape[1:]
        ).sum(axis=1)
        # Rows of a partial tile that are past the end are dropped.
        return gradient.at[place].set(sums.astype(gradient.dtype), mode="drop", unique_indices=True)

    return (
        store_summed_split_gradients(dk, split_gradients[0]),
        store_summed_split_gradients(dv, split_gradients[1]),
        dq,
    )


def _scratch(spec: HopperSpec, tile: BackwardTile, operands: OperandsByName) -> dict[str, Any]:
    """Returns shared memory and mbarriers, by the kernel's names."""
    num_key_chunks = tile.key_chunks_per_row * tile.key_tiles_per_block + tile.num_peer_key_chunks
    buffers: dict[str, Any] = {
        "k": wgmma_operand_smem(
            (num_key_chunks, WGMMA_M, tile.key_chunk_columns), spec.dtype, tile.array_swizzle_bytes("k")
        ),
        "v": wgmma_operand_smem((tile.key_tiles_per_block, WGMMA_M, spec.value_dim), spec.dtype),
        # Two steps, with the size of a tile of scores each.
        "ds": wgmma_operand_smem(
            (2 * tile.block_kv * tile.block_q // WGMMA_M**2, WGMMA_M, WGMMA_M),
            spec.dtype,
            tile.array_swizzle_bytes("ds"),
        ),
        "dq": plgpu.SMEM(
            (BACKWARD_CONSUMER_WARPGROUPS, WGMMA_M, tile.dq_strip_columns),
            jnp.float32,
            # 32 float32 columns are a row of the 128-byte swizzle: stores by lanes have no bank conflicts.
            transforms=(plgpu.TilingTransform((8, 32)), plgpu.SwizzleTransform(128)),
        ),
    }
    for name, stages in tile.stages_by_operand.items():
        size = spec.head_dim if name == "q" else spec.value_dim
        buffers[name] = wgmma_operand_smem((stages, tile.block_q, size), spec.dtype, tile.array_swizzle_bytes(name))
        buffers[f"{name}_full"] = plgpu.Barrier(
            num_arrivals=1 + len(tile.row_array_names(spec, name)), num_barriers=stages
        )
        buffers[f"{name}_free"] = _free_barriers(tile, stages)
    copies = (
        tile.key_tiles_per_block * (tile.key_chunks_per_row + 1 + len(tile.row_array_names(spec, "k")))
        + tile.num_peer_key_chunks
    )
    buffers["kv_full"] = plgpu.Barrier(num_arrivals=copies)
    buffers["dq_done"] = plgpu.Barrier(num_arrivals=tile.warpgroups_per_dq_piece)
    buffers["dq_full"] = plgpu.Barrier(
        num_arrivals=tile.warpgroups_per_dq_piece, num_barriers=tile.num_dq_pieces * tile.num_dq_adder_warps
    )
    buffers["dq_free"] = plgpu.Barrier(num_arrivals=1, num_barriers=tile.num_dq_pieces)
    return buffers | (_cluster_scratch(tile) if tile.has_wide_heads else _scratch_without_cluster(spec, tile, operands))


def _scratch_without_cluster(spec: HopperSpec, tile: BackwardTile, operands: OperandsByName) -> dict[str, Any]:
    """Returns the scratch memory of blocks without a cluster."""
    number_full = {"number_full": plgpu.Barrier(num_arrivals=1)}
    if tile.is_register_bound:
        return (
            _packed_query_vectors_scratch(tile)
            | number_full
            | {"ds_full": plgpu.Barrier(num_arrivals=tile.warpgroups_per_dq_piece)}
        )
    buffers: dict[str, Any] = {"number": plgpu.SMEM((1,), jnp.int32)} | number_full
    for name in tile.row_array_names(spec, "q"):
        buffers[name] = plgpu.SMEM((tile.query_stages, tile.block_q), operands[name].dtype)
    for name in tile.row_array_names(spec, "k"):
        buffers[name] = plgpu.SMEM((tile.key_tiles_per_block, WGMMA_M), operands[name].dtype)
    return buffers | {"ds_full": plgpu.Barrier(num_arrivals=tile.warpgroups_per_dq_piece)}


def _cluster_scratch(tile: BackwardTile) -> dict[str, Any]:
    """Returns scratch memory of the blocks of a cluster."""
    return _packed_query_vectors_scratch(tile) | {
        "weights_full": plgpu.Barrier(num_arrivals=1),
        "ds_free": _free_barriers(tile, 2),
    }


def _packed_query_vectors_scratch(tile: BackwardTile) -> dict[str, Any]:
    """Returns the elements per row packed into one array, for lack of memory: every array is aligned to 1024 bytes."""
    return {
        "rows": plgpu.SMEM((2, tile.query_stages, tile.block_q), jnp.float32),
        "words": plgpu.SMEM((tile.query_stages + 1, tile.block_q), jnp.int32),
    }


def _add_query_vector_views(buffers: dict[str, Any]) -> dict[str, Any]:
    """Returns named views of packed arrays. The row after the ids of queries holds the tile's index and, in a cluster,
    its mbarriers.
    """
    rows, words = buffers["rows"], buffers["words"]
    last = words.at[words.shape[0] - 1]
    return buffers | {"shift": rows.at[0], "delta": rows.at[1], "q_ids": words, "pair": last, "number": last}


def _free_barriers(tile: BackwardTile, num_barriers: int) -> Any:
    """Returns mbarriers at which all consumer warpgroups arrive, of both members of a cluster."""
    if tile.has_wide_heads:
        return plgpu.ClusterBarrier(
            collective_axes=(clusters.CLUSTER_AXIS,),
            num_arrivals=BACKWARD_CONSUMER_WARPGROUPS,
            num_barriers=num_barriers,
        )
    return plgpu.Barrier(num_arrivals=BACKWARD_CONSUMER_WARPGROUPS, num_barriers=num_barriers)
