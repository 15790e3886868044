"""Splits of a fixed number of keys in a `batch_invariant` block: tile sizes, and room for partial softmaxes."""

import dataclasses
from collections.abc import Iterable
from typing import Any

from ejkernel.arithmetic import cdiv
from ejkernel.families.paged_attention import PagedAttention, causal_window_bounds
from ejkernel.families.paged_attention import pages as paged_cache
from ejkernel.ops.chips import Gpu, gpu_of
from ejkernel.ops.device import DeviceInfo, current_device
from ejkernel.ops.params import Direction
from ejkernel_triton.launch import is_interpreting
from ejkernel_triton.paged_attention import config
from ejkernel_triton.paged_attention.config import PagedForward
from ejkernel_triton.paged_shared_memory import MIN_TILE
from ejkernel_triton.sizes import pad_to_dot_size

SPLIT_KEYS, INTERPRETED_SPLIT_KEYS = 512, 32
"""Keys per split; few where kernels are interpreted, so that short sequences are split."""

MAX_SLOT_BYTES = 2**28
"""The most memory for partial softmaxes of splits; calls that could need more do not cut items."""


def batch_invariant(record: PagedAttention, device: DeviceInfo, direction: Direction) -> PagedForward:
    """Returns the tile sizes of a call in a `batch_invariant` block.

    The number of keys per tile follows from dtypes and head dimensions alone. That of rows follows from the batch only
    where tiles of all numbers of rows sum in the same steps.
    """
    tile = _largest_tile(record, device)
    if not _sums_in_equal_steps(record, gpu_of(device)):
        return tile
    rows = config.query_rows_per_tile(record, device)
    if config.max_score_rows(record, device) == config.PREFILL_SCORE_ROWS:
        prefill_tiles = (
            dataclasses.replace(tile, block_q=rows, num_warps=warps, num_stages=stages)
            for block_kv, warps, stages in config.PREFILL_TILES
            if block_kv == tile.block_kv
        )
        return next((x for x in prefill_tiles if config.fits_shared_memory(record, x, gpu_of(device))), tile)
    warps = 4 if rows > 1 or tile.tile_within_page or config.needs_small_key_tiles(record) else 2
    return dataclasses.replace(tile, block_q=min(tile.block_q, rows), num_warps=warps)


def _largest_tile(record: PagedAttention, device: DeviceInfo) -> PagedForward:
    """Returns the tile with the most rows, but for prefills of many; its number of keys is that of all calls."""
    chip, is_small = gpu_of(device), config.needs_small_key_tiles(record)
    max_rows = config.MAX_SCORE_ROWS if _sums_in_equal_steps(record, chip) else MIN_TILE
    block_q = max(1, max_rows // config.query_heads_per_tile(record, chip))
    tile = config.make_config(record, device, 32 if is_small else 64, 4, 2 if is_small else 3)
    tile = dataclasses.replace(tile, block_q=1 << (block_q.bit_length() - 1), batch_invariant=True)
    tile = config.shrink_to_shared_memory(record, tile, chip)
    return dataclasses.replace(tile, tile_within_page=paged_cache.page_size(record) % tile.block_kv == 0)


def _sums_in_equal_steps(record: PagedAttention, chip: Gpu) -> bool:
    """Returns whether tiles of all numbers of rows sum in the same steps: on Hopper, those of one dtype of 16 bits.

    Over a cache of 8 bits, 84 elements of 30 of 64 rows differed on an H200 (docs/lab/batch_invariance.md).
    """
    dtypes = {str(x.dtype) for x in (record.query, record.key_pages, record.value_pages) if x is not None}
    is_converted = len(dtypes) > 1 or record.compute_dtype is not None
    return chip.architecture == "hopper" and record.query.dtype.itemsize == 2 and not is_converted


def invariance_limits(record: PagedAttention) -> Iterable[str]:
    """Yields why rows of a record depend on the rest of its call."""
    if record.latent is not None:
        yield "a latent cache: key tiles have as many keys as fit next to the rows of a tile"
    elif record.shared_prefix is not None:
        yield "shared_prefix: its keys are a call of their own, whose results are merged with those of the others"
    elif record.alibi_slopes is not None:
        yield "alibi_slopes: distances are counted from the first new token, so scores are rounded as the chunk has it"
    elif reason := _shared_memory_limit(record):
        yield reason


def _shared_memory_limit(record: PagedAttention) -> str:
    device = current_device()
    tile, chip = _largest_tile(record, device), gpu_of(device)
    if config.fits_shared_memory(record, tile, chip):
        return ""
    needed_bytes = config.shared_memory_bytes(record, tile, chip)
    return f"a tile takes up to {needed_bytes} bytes of shared memory, and {chip.target} has {chip.shared_memory}"


def begins_with_full_tiles(record: PagedAttention) -> bool:
    """Returns whether all rows of a tile see all keys of all but the last key tiles of their range."""
    return causal_window_bounds(record)[0] is None and record.chunk_size is None and record.kv_starts is None


def split_constants(
    record: PagedAttention, params: PagedForward, heads_per_tile: int, num_entries: int
) -> dict[str, Any]:
    """Returns the constants of splits, and of the slots of their partial softmaxes.

    Args:
        record: The canonical arguments.
        params: Tile sizes and programs.
        heads_per_tile: Query heads per tile.
        num_entries: Entries of the work list.
    """
    if not params.batch_invariant:
        return {"SPLIT_TILES": 0, "CUTS_ITEMS": True, "SLOTS_PER_PROGRAM": 2, "SLOT_ROWS": 0}
    kv_heads = paged_cache.kv_heads(record)
    split_tiles = (INTERPRETED_SPLIT_KEYS if is_interpreting() else SPLIT_KEYS) // params.block_kv
    max_splits = cdiv(paged_cache.max_sequence_len(record), split_tiles * params.block_kv)
    # A program stores the splits of the item in which its share starts: all but the first, if the share is that long.
    max_share = cdiv(num_entries * kv_heads * max_splits, params.num_programs)
    slots, rows = 1 + min(max(1, max_splits - 1), max_share), params.block_q * heads_per_tile
    num_slots = params.num_programs * (record.query.shape[1] // kv_heads // heads_per_tile) * slots
    cuts_items = 4 * num_slots * rows * pad_to_dot_size(paged_cache.value_head_dim(record)) <= MAX_SLOT_BYTES
    return {
        "SPLIT_TILES": split_tiles,
        "CUTS_ITEMS": cuts_items,
        "SLOTS_PER_PROGRAM": slots if cuts_items else 1,
        "SLOT_ROWS": rows if cuts_items else 1,
    }
