"""Writes the output and lse of a tile in the forward kernel, and frees the buffer of its queries."""

import functools
from typing import Any

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from ejkernel_pallas.gpu.hopper import tile_scheduler
from ejkernel_pallas.gpu.hopper.row_ranges import store_row_values, store_rows
from ejkernel_pallas.gpu.hopper.sizes import I32, SWIZZLE_COLUMNS, WGMMA_M
from ejkernel_pallas.gpu.tiled_attention.kernels.forward_call import Call, QueryTile, query_tile_of_warpgroup


def write_output(call: Call, query_tile: QueryTile, output: Any, lse: Any) -> None:
    """Writes the rows of a whole tile, of a split of a tile, or of the part of a tile that belongs to its sequence."""
    if call.paged_key_access is not None:
        _write_paged_tile(call, query_tile, output, lse)
        return
    results = call, query_tile, output, lse
    whole, part = (functools.partial(write, *results) for write in (_write_tile, _write_split_tile))
    tile_scheduler.run_whole_or_split_tile(call.schedule, query_tile.item, whole, part)


def _write_paged_tile(call: Call, query_tile: QueryTile, output: Any, lse: Any) -> None:
    """Writes a tile of a sequence in pages."""
    # Reloaded: the rows' offsets would take registers in the main loop.
    query_tile = query_tile_of_warpgroup(
        call, query_tile.item, query_tile.query_buffer_index, lax.axis_index("warpgroup")
    )
    assert query_tile.paged_tile is not None
    whole = (query_tile.paged_tile.sequence_row_start <= 0) & (query_tile.paged_tile.sequence_row_end >= WGMMA_M)
    pl.when(whole)(lambda: _write_tile(call, query_tile, output, lse))
    pl.when(~whole)(lambda: _write_rows_of_sequence(call, query_tile, output, lse))


def _write_rows_of_sequence(call: Call, query_tile: QueryTile, output: Any, lse: Any) -> None:
    """Writes the rows of a tile that belong to its sequence, directly from registers. The next tile writes the other
    rows.
    """
    assert query_tile.paged_tile is not None
    item, (*_, row, first, end) = query_tile.item, query_tile.paged_tile
    # `end` may be negative if a warpgroup has no rows of the sequence, and stores would read that as a large number.
    target, end = call.outputs[0].at[item.batch_row, :, item.head], jnp.maximum(end, 0)
    store_rows(target, output.astype(call.spec.dtype), row, I32(0), end, first)
    store_row_values(call.outputs[1].at[item.batch_row, item.head], lse, row, first, end)


def _write_tile(call: Call, query_tile: QueryTile, output: Any, lse: Any) -> None:
    """Writes the rows of a whole tile: to shared memory, and from there by TMA, which skips rows out of bounds."""
    sums, output = call.shared.lse.at[query_tile.query_buffer_index], output.astype(call.spec.dtype)
    places = _output_columns_and_buffers(call, query_tile)
    for columns, place in places:
        place[...] = output if columns is None else output[:, columns.start : columns.start + columns.size]
    sums[...] = lse
    # TMA reads shared memory through the async proxy, to which the commit makes these writes visible.
    plgpu.commit_smem()
    item, rows = query_tile.item, pl.ds(query_tile.first_query, WGMMA_M)
    for columns, place in places:
        target = call.outputs[0].at[item.batch_row, rows, item.head]
        plgpu.copy_smem_to_gmem(place, target if columns is None else target.at[:, columns])
    plgpu.copy_smem_to_gmem(sums, call.outputs[1].at[item.batch_row, item.head, rows])


def _output_columns_and_buffers(call: Call, query_tile: QueryTile) -> list[tuple[Any, Any]]:
    """Returns columns of a warpgroup's output, None for all, and their shared memory, which is that of its queries, or
    of its total of splits.
    """
    spec = call.spec
    if spec.blocks_per_split:
        count = spec.value_dim // SWIZZLE_COLUMNS
        first = lax.axis_index("warpgroup") * (2 * count)
        return [(pl.ds(n * SWIZZLE_COLUMNS, SWIZZLE_COLUMNS), call.shared.output.at[first + n]) for n in range(count)]
    if spec.lists_first_keys:
        chunks = call.shared.q.at[query_tile.query_buffer_index]
        count = spec.value_dim // SWIZZLE_COLUMNS
        return [(pl.ds(n * SWIZZLE_COLUMNS, SWIZZLE_COLUMNS), chunks.at[n]) for n in range(count)]
    if spec.value_dim == spec.head_dim:
        return [(None, call.shared.q.at[query_tile.query_buffer_index])]
    # Outputs narrower than queries leave some of the buffer unused; the other warpgroup's buffer is not touched.
    first = query_tile.query_buffer_index * (spec.head_dim // SWIZZLE_COLUMNS)
    return [
        (pl.ds(n * SWIZZLE_COLUMNS, SWIZZLE_COLUMNS), call.shared.output.at[first + n])
        for n in range(spec.value_dim // SWIZZLE_COLUMNS)
    ]


def _write_split_tile(call: Call, query_tile: QueryTile, output: Any, lse: Any) -> None:
    """Writes the rows of one part of a split tile, in float32, for the combine step."""
    _, _, outputs, sums = call.outputs
    rows = pl.ds(query_tile.first_query - query_tile.item.tile_in_head * call.tile.block_q, WGMMA_M)
    outputs[query_tile.item.split_index, rows] = output
    sums[query_tile.item.split_index, rows] = lse


def release_queries(call: Call, query_buffer_index: Any) -> None:
    """Releases a buffer of queries once TMA has read the output in it."""
    # Read, not written: the buffer is free before HBM has the output.
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    plgpu.barrier_arrive(call.shared.q_free.at[query_buffer_index])
