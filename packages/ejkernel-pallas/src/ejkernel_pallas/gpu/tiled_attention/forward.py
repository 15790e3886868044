"""Forward pass of tiled softmax attention on Hopper."""

import dataclasses
import functools
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp

from ejkernel.families.tiled_attention import SoftmaxResiduals, TiledAttention, query_and_key_positions
from ejkernel.families.tiled_attention.score_terms import functions_as_arguments
from ejkernel.families.tiled_attention.tile_pairs import padding_as_segments
from ejkernel.planning.batch_rows import run_with_batch_rows
from ejkernel_pallas.gpu.hopper import tile_scheduler
from ejkernel_pallas.gpu.hopper.fixed_splits import thread_tile_shape
from ejkernel_pallas.gpu.hopper.launch import WGMMA_TRANSFORMS, launch, pad_rows, wgmma_operand_smem
from ejkernel_pallas.gpu.hopper.sizes import SWIZZLE_COLUMNS, WGMMA_M
from ejkernel_pallas.gpu.hopper.split_tiles import NO_SPLIT, split_tail_wave
from ejkernel_pallas.gpu.tiled_attention.config import ForwardTile, HopperForward, forward_tile
from ejkernel_pallas.gpu.tiled_attention.kernels.dropout import dropout_key_operands
from ejkernel_pallas.gpu.tiled_attention.kernels.flash_forward import forward_kernel
from ejkernel_pallas.gpu.tiled_attention.kernels.forward_call import Call, PagedKeyAccess, SharedMemory
from ejkernel_pallas.gpu.tiled_attention.kernels.pair_functions import pair_operands
from ejkernel_pallas.gpu.tiled_attention.kernels.split_combine import merge_split_tiles
from ejkernel_pallas.gpu.tiled_attention.plan.block_map import key_block_ranges, num_tiles, pad_segment_ids
from ejkernel_pallas.gpu.tiled_attention.plan.documents import are_sorted, document_operands, key_order
from ejkernel_pallas.gpu.tiled_attention.plan.key_ranges import key_ranges, position_key_ranges, position_limits
from ejkernel_pallas.gpu.tiled_attention.plan.pattern import key_block_lists
from ejkernel_pallas.gpu.tiled_attention.plan.segment_extents import find_tile_extents
from ejkernel_pallas.gpu.tiled_attention.spec import HopperSpec, make_spec

MIN_HEADS_PER_BUNDLE = 16
"""The smallest number of heads per bundle if tiles have unequal numbers of key blocks.

Blocks that run together then have tiles of equal index in their heads, and read the same keys at about the same time.
On an H200, 16 packed sequences with head dimension 64 are 30% faster than with 4 heads. With a full mask it costs 6%,
and with 32 heads, whose keys do not fit L2, causal calls take up to 5% more time.
"""


def forward(record: TiledAttention, params: HopperForward) -> tuple[jax.Array, SoftmaxResiduals]:
    """Returns attention output and residuals of a record.

    Args:
        record: The canonical arguments.
        params: `block_q` queries per block, 64 per consumer warpgroup; `block_kv` keys per step; `stages` tiles of keys
            in shared memory.

    Raises:
        ValueError: A tile size is not valid for the kernel.

    Returns:
        Output [B, T, H, D] in the query's dtype, and the residuals for the backward pass.
    """
    record = functions_as_arguments(record)
    spec = dataclasses.replace(make_spec(record), is_batch_invariant=params.batch_invariant)
    tile = forward_tile(params, spec)
    operands, run = _make_operands(record, spec, tile), _run_by_documents if spec.lists_first_keys else _run_kernel
    output, lse = run_with_batch_rows(functools.partial(run, spec, tile), operands, spec.batch_size)
    return output[:, : spec.q_len], SoftmaxResiduals(lse=lse[..., : spec.q_len])


def _run_by_documents(
    spec: HopperSpec, tile: ForwardTile, operands: dict[str, jax.Array], batch_size: int
) -> tuple[jax.Array, ...]:
    """Runs the kernel with blocks that begin with documents; keys are brought into their order if ids are not."""

    def run(operands: dict[str, jax.Array], order: jax.Array | None = None) -> tuple[jax.Array, ...]:
        ids = operands["q_ids"], operands["k_ids"]
        operands = operands | document_operands(spec, ids, tile.block_q, tile.block_kv, order)
        for name in ("q", "k", "v"):  # columns in chunks, as in shared memory
            operands[name] = operands[name].reshape(*operands[name].shape[:3], -1, SWIZZLE_COLUMNS)
        # A block may begin with the last key.
        operands["k_ids"] = jnp.pad(ids[1], ((0, 0), (0, tile.block_kv)), constant_values=-2)
        return _run_kernel(spec, tile, operands, batch_size)

    def run_in_order(operands: dict[str, jax.Array]) -> tuple[jax.Array, ...]:
        order = key_order(operands["k_ids"])
        changes = {"k_ids": jnp.take_along_axis(operands["k_ids"], order, axis=1)}
        for name in ("k", "v"):
            rows = order[:, : operands[name].shape[1], None, None]
            changes[name] = jnp.take_along_axis(operands[name], rows, axis=1)
        return run(operands | changes, order)

    # Both branches have the kernel, so that keys are copied only in one of them.
    sorted_ids = are_sorted((operands["q_ids"], operands["k_ids"]), tile.block_q, tile.block_kv)
    return jax.lax.cond(sorted_ids, run, run_in_order, operands)


def _run_kernel(
    spec: HopperSpec, tile: ForwardTile, operands: dict[str, jax.Array], batch_size: int
) -> tuple[jax.Array, ...]:
    """Runs the kernel; returns outputs padded to whole groups of rows, and lse padded to whole tiles."""
    count, blocks = operands["table"].shape[-2], tile_scheduler.num_multiprocessors()
    plan = tile_scheduler.make_tile_schedule(
        count,
        batch_size=batch_size,
        heads_per_batch_row=spec.num_heads,
        reverses_tiles=spec.right_window is not None or spec.mask_mod is not None,
        head_bytes=_kv_bytes_per_head(spec),
        heads_per_group=spec.group_size,
        is_persistent=True,
        tail_split=NO_SPLIT
        if spec.may_mask_pairs or spec.is_batch_invariant  # the number of tiles depends on the batch
        else split_tail_wave(batch_size * spec.num_heads * count, blocks, num_tiles(spec.kv_len, tile.block_kv)),
    )

    results = launch_forward_kernel(spec, tile, plan, operands, batch_size)
    return _merge_split_tiles(plan, *results) if plan.tail_split.num_split_tiles else results


def launch_forward_kernel(
    spec: HopperSpec,
    tile: ForwardTile,
    schedule: tile_scheduler.TileSchedule,
    operands: dict[str, jax.Array],
    batch_size: int,
    paged_key_access: PagedKeyAccess | None = None,
) -> tuple[jax.Array, ...]:
    """Returns the kernel's outputs [batch, T, H, Dv], lse [batch, H, whole tiles], and those of parts of split
    tiles.
    """

    def body(operand_refs: dict[str, Any], output_refs: Any, buffers: dict[str, Any]) -> None:
        shared = SharedMemory(**_add_views(spec, buffers))
        forward_kernel(
            Call(
                spec,
                tile,
                schedule,
                operand_refs,
                output_refs,
                shared,
                tile_scheduler.make_tile_counter(),
                paged_key_access,
            )
        )

    # Tiles of paged queries start where sequences do; all others are whole, one after the other.
    rows = operands["q"].shape[1] if spec.keys_in_pages else schedule.tiles_per_head * tile.block_q
    outputs = [
        jax.ShapeDtypeStruct((batch_size, *operands["q"].shape[1:3], spec.value_dim), spec.dtype),
        jax.ShapeDtypeStruct((batch_size, spec.num_heads, rows), jnp.float32),
    ]
    if schedule.tail_split.num_split_tiles:
        parts = schedule.tail_split.num_split_tiles * schedule.tail_split.splits_per_tile
        sizes = (parts, tile.block_q, spec.value_dim), (parts, tile.block_q)
        outputs += [jax.ShapeDtypeStruct(size, jnp.float32) for size in sizes]
    return launch(
        body, operands, outputs, _scratch(spec, tile, paged_key_access), schedule.num_blocks, tile.consumer_warpgroups
    )


def _merge_split_tiles(
    schedule: tile_scheduler.TileSchedule, output: jax.Array, lse: jax.Array, *split_results: jax.Array
) -> tuple[jax.Array, ...]:
    """Returns outputs and lse, with the split tiles merged from their parts."""
    outputs, sums = merge_split_tiles(
        *(
            x.reshape(schedule.tail_split.num_split_tiles, schedule.tail_split.splits_per_tile, *x.shape[1:])
            for x in split_results
        )
    )
    batch, rows, head = tile_scheduler.output_indices_of_split_tiles(schedule, sums.shape[1])
    return (
        # Rows of a partial tile that are past the end are dropped.
        output.at[batch, rows, head].set(outputs.astype(output.dtype), mode="drop", unique_indices=True),
        lse.at[batch, head, rows].set(sums, unique_indices=True),
    )


def _kv_bytes_per_head(spec: HopperSpec) -> int:
    """Returns bytes of keys and values of a head, lowered so that at least `MIN_HEADS_PER_BUNDLE` heads form a
    bundle.
    """
    size = spec.kv_len * (spec.head_dim + spec.value_dim) * spec.dtype.itemsize
    return (
        min(size, tile_scheduler.L2_BYTES_PER_BUNDLE * spec.group_size // MIN_HEADS_PER_BUNDLE)
        if spec.may_mask_pairs
        else size
    )


def _make_operands(record: TiledAttention, spec: HopperSpec, tile: ForwardTile) -> dict[str, jax.Array]:
    """Returns the kernel's operands, for every row of the batch or shared by all."""
    operands, ids, positions = {}, None, None
    if record.q_segment_ids is not None and record.kv_segment_ids is not None:  # ids of one side only restrict nothing
        operands["q_ids"] = pad_segment_ids(record.q_segment_ids, tile.block_q, -1)
        operands["k_ids"] = pad_segment_ids(record.kv_segment_ids, tile.block_kv, -2)
        ids = operands["q_ids"], operands["k_ids"]
        if not spec.lists_first_keys:
            operands["padded"] = find_tile_extents(operands["k_ids"], tile.block_kv).has_padding.astype(jnp.int32)
            operands["ranges"] = key_ranges(spec, ids, tile.block_kv)
    if spec.has_positions:
        positions = query_and_key_positions(record)
        limits = position_limits(spec, *positions, tile.block_q)
        operands["ranges"], operands["q_limits"] = position_key_ranges(limits), limits.limits
        operands["k_positions"] = jnp.pad(limits.key_positions, ((0, 0), (0, -spec.kv_len % tile.block_kv)))
    if record.softmax_aux is not None:
        operands["sinks"] = record.softmax_aux.astype(jnp.float32)[None]
    if spec.has_block_lists and not spec.lists_first_keys:
        operands |= key_block_lists(padding_as_segments(record), tile.block_q, tile.block_kv)
    elif not spec.has_block_lists:
        operands["table"] = jnp.asarray(key_block_ranges(spec, ids, tile.block_q, tile.block_kv, positions))
    operands |= dropout_key_operands(record, spec, tile.block_q, tile.block_kv) | pair_operands(record, spec)
    keys = {"k": pad_rows(record.key, tile.block_kv), "v": pad_rows(record.value, tile.block_kv)}
    return {"q": pad_rows(record.query, WGMMA_M)} | keys | operands


def _scratch(spec: HopperSpec, tile: ForwardTile, paged_key_access: PagedKeyAccess | None) -> dict[str, Any]:
    """Returns shared memory and mbarriers, by the names of `SharedMemory`."""
    queries, copies = (
        tile.query_buffers * tile.consumer_warpgroups,
        1 if paged_key_access is None else paged_key_access.copies_per_block,
    )
    named_buffers: dict[str, Any] = {
        **_query_scratch(spec, queries),
        "k": wgmma_operand_smem((tile.kv_stages, tile.block_kv, spec.head_dim), spec.dtype),
        "v": wgmma_operand_smem((tile.kv_stages, tile.block_kv, spec.value_dim), spec.dtype),
        "lse": plgpu.SMEM((queries, WGMMA_M), jnp.float32),
        # One arrival per copy; TMA counts the bytes of each.
        "q_full": plgpu.Barrier(num_arrivals=1 + spec.has_key_ranges + spec.has_dropout, num_barriers=queries),
        "q_free": plgpu.Barrier(num_arrivals=1, num_barriers=queries),
        # A block of pages has one more arrival, for its word in `valid_key_words`.
        "k_full": plgpu.Barrier(
            num_arrivals=copies + spec.has_dropout + spec.keys_in_pages, num_barriers=tile.kv_stages
        ),
        "k_free": plgpu.Barrier(num_arrivals=tile.consumer_warpgroups, num_barriers=tile.kv_stages),
        "v_full": plgpu.Barrier(num_arrivals=copies, num_barriers=tile.kv_stages),
        "v_free": plgpu.Barrier(num_arrivals=tile.consumer_warpgroups, num_barriers=tile.kv_stages),
        "tile_indices": plgpu.SMEM((2,), jnp.int32),
        "tile_index_full": plgpu.Barrier(num_arrivals=1, num_barriers=2),
        # The producer reads the index as well.
        "tile_index_free": plgpu.Barrier(num_arrivals=tile.consumer_warpgroups + 1, num_barriers=2),
    }
    if spec.lists_first_keys:
        named_buffers |= _chunk_scratch(spec, tile, queries)
    if spec.has_dropout:
        named_buffers["q_dropout_keys"] = plgpu.SMEM((queries, WGMMA_M), jnp.uint32)
        named_buffers["k_dropout_keys"] = plgpu.SMEM((tile.kv_stages + 1, tile.block_kv), jnp.uint32)
    if spec.blocks_per_split:
        named_buffers |= _split_scratch(spec, tile)
    elif spec.keys_in_pages:
        named_buffers["valid_key_words"] = plgpu.SMEM((tile.kv_stages,), jnp.int32)
    if spec.has_segments or spec.keys_in_pages:
        named_buffers["v_copied"] = plgpu.Barrier(num_arrivals=named_buffers["v_full"].num_arrivals)
    if spec.has_key_ranges:
        named_buffers["key_ranges"] = plgpu.SMEM((queries, 2 + spec.lists_first_keys, WGMMA_M), jnp.int32)
    return named_buffers


def _chunk_scratch(spec: HopperSpec, tile: ForwardTile, query_tiles: int) -> dict[str, Any]:
    """Returns queries, keys and values in chunks of 64 columns, with a view of the same memory without tiles.

    A copy into tiles of eight rows has to begin at a multiple of eight. All rows of a chunk are contiguous, whether one
    counts them in tiles or not, so copies into the view may begin with any row.
    """
    sizes = {
        "q": (query_tiles, WGMMA_M, spec.head_dim),
        "k": (tile.kv_stages, tile.block_kv, spec.head_dim),
        "v": (tile.kv_stages, tile.block_kv, spec.value_dim),
    }
    buffers: dict[str, Any] = {}
    for name, (count, rows, columns) in sizes.items():
        shape, swizzle = (count, columns // SWIZZLE_COLUMNS, rows, SWIZZLE_COLUMNS), WGMMA_TRANSFORMS[1:]
        buffers[name] = plgpu.RefUnion(
            wgmma_operand_smem(shape, spec.dtype), plgpu.SMEM(shape, spec.dtype, transforms=swizzle)
        )
    return buffers


def _split_scratch(spec: HopperSpec, tile: ForwardTile) -> dict[str, Any]:
    """Returns the totals of splits, and one array of indices of tiles and words of keys: every array begins at a
    multiple of 1024 bytes, of which totals leave few.

    Outputs, of half the size, have a view of the totals' memory as [64, 64] tiles, so that queries are free early.
    """
    totals = tile.consumer_warpgroups, *thread_tile_shape(spec.value_dim)
    output_tiles = 2 * tile.consumer_warpgroups * spec.value_dim // SWIZZLE_COLUMNS
    outputs = wgmma_operand_smem((output_tiles, WGMMA_M, SWIZZLE_COLUMNS), spec.dtype)
    return {
        "tile_indices": plgpu.SMEM((2 + tile.kv_stages,), jnp.int32),
        "split_totals": plgpu.RefUnion(plgpu.SMEM(totals, jnp.float32), outputs),
    }


def _query_scratch(spec: HopperSpec, tiles: int) -> dict[str, Any]:
    """Returns tiles of queries, which outputs overwrite.

    Outputs with another head dimension have a view of the same memory in which a tile of queries is a sequence of [64,
    64] tiles, so that those of one warpgroup do not overlap the queries of another.
    """
    queries = wgmma_operand_smem((tiles, WGMMA_M, spec.head_dim), spec.dtype)
    if spec.value_dim == spec.head_dim or spec.blocks_per_split:
        return {"q": queries}
    outputs = wgmma_operand_smem((tiles * spec.head_dim // SWIZZLE_COLUMNS, WGMMA_M, SWIZZLE_COLUMNS), spec.dtype)
    return {"q": plgpu.RefUnion(queries, outputs)}


def _add_views(spec: HopperSpec, buffers: dict[str, Any]) -> dict[str, Any]:
    """Returns buffers with separate names for queries and outputs that share memory, and for words that do."""
    if spec.blocks_per_split:
        words, (totals, outputs) = buffers["tile_indices"], buffers["split_totals"]
        num_key_words = words.shape[0] - 2
        return buffers | {
            "tile_indices": words.at[pl.ds(0, 2)],
            "valid_key_words": words.at[pl.ds(2, num_key_words)],
            "split_totals": totals,
            "output": outputs,
        }
    if spec.lists_first_keys:
        names = {f"{name}{view}": n for name in ("q", "k", "v") for n, view in enumerate(("", "_rows"))}
        return buffers | {name: buffers[name[0]][n] for name, n in names.items()}
    if spec.value_dim == spec.head_dim:
        return buffers
    queries, outputs = buffers["q"]
    return buffers | {"q": queries, "output": outputs}
