"""Tile sizes and launch parameters of the paged-attention kernels."""

import dataclasses
from typing import Any

import jax.numpy as jnp

from ejkernel.arithmetic import cdiv
from ejkernel.families.paged_attention import PagedAttention
from ejkernel.families.paged_attention import pages as paged_cache
from ejkernel.ops.chips import KIBI, Gpu, gpu_of
from ejkernel.ops.device import DeviceInfo
from ejkernel.ops.params import Direction
from ejkernel_triton.launch import is_interpreting
from ejkernel_triton.paged_shared_memory import (
    MIN_TILE,
    TileShape,
    amd_shared_memory_bytes,
    nvidia_shared_memory_bytes,
)
from ejkernel_triton.sizes import pad_to_power_of_two


@dataclasses.dataclass(frozen=True, kw_only=True)
class PagedForward:
    """Configuration of the paged-attention kernels.

    Attributes:
        block_q: Query rows of one sequence per tile; times the query heads of a KV head they are the rows of a tile of
            scores.
        block_kv: Keys per tile.
        num_programs: Persistent programs, each with an equal share of the key tiles of a call (stream-K).
        num_warps: Warps per program.
        num_stages: Pipeline stages of the copies of key and value tiles.
        tile_within_page: Whether a tile is within one page, so that its index is loaded once, not for every key.
        batch_invariant: Whether splits have a fixed number of keys, and are folded in a fixed order.
    """

    block_q: int
    block_kv: int
    num_programs: int
    num_warps: int
    num_stages: int
    tile_within_page: bool = False
    batch_invariant: bool = False


PUBLIC_FIELDS = {
    "q_blocksize": "block_q",
    "kv_blocksize": "block_kv",
    "block_k": "block_kv",
    "num_warps": "num_warps",
    "num_stages": "num_stages",
}
"""Maps fields of the public configurations to fields of this one."""

MAX_SCORE_ROWS = 64
"""The largest number of rows of a tile of scores in decoding and short prefills."""

PREFILL_SCORE_ROWS = 128
"""Rows of a tile of scores in prefill: long queries, heads of at most 128 columns, 16-bit elements."""

PREFILL_TILES = ((64, 8, 3), (64, 8, 2), (32, 8, 4), (32, 8, 2))
"""Key tile, warps and stages for tiles of `PREFILL_SCORE_ROWS`, the fastest on an H200 first.

Chunks of 512: 315, 234, 275 and 179 TFLOP/s (docs/lab/paged_attention_gpu.md). Four warps, or 128 keys, spill.
"""

SMALL_LATENT_TILES = ((32, 4, 3, 2), (32, 4, 2, 2), (16, 4, 2, 2), (16, 4, 1, 2))
LATENT_TILES_FEW_ROWS = ((64, 4, 3, 1), *SMALL_LATENT_TILES)
LATENT_TILES_SOME_ROWS = ((64, 8, 3, 1), *SMALL_LATENT_TILES)
LATENT_TILES_MANY_ROWS = ((64, 8, 2, 1), (32, 8, 3, 1), (32, 8, 2, 1), (64, 8, 1, 1), (16, 8, 2, 1), (16, 8, 1, 1))
"""Key tile, warps, stages and programs per multiprocessor for at most 16, at most 32 and more rows of scores in a
latent cache, the fastest on an H200 first.
"""

RESIDENT_PROGRAMS_PER_SM = 2
"""Programs per multiprocessor that registers allow."""

MAX_HEADS_PER_TILE, MAX_LATENT_HEADS_PER_TILE, MAX_FLOAT32_LATENT_HEADS_PER_TILE = 128, 64, 16
"""The largest number of query heads of one KV head in a tile. Accumulators of 128 heads and 512 latent columns would
fill the registers of a multiprocessor. Two programs of 64 heads each read the same keys at about the same time, once
from HBM.
"""

MAX_FLOAT32_QUERY_ELEMENTS = 8 * KIBI
"""The largest number of elements of a tile of float32 queries, which shared memory holds split in two."""


def heuristic(record: PagedAttention, device: DeviceInfo, direction: Direction) -> PagedForward:
    """Returns the default tile sizes: many query rows per tile if sequences have many, otherwise as few as possible."""
    if record.latent is not None:
        return _latent_candidates(record, device)[0]
    if max_score_rows(record, device) == PREFILL_SCORE_ROWS:
        return _prefill_candidates(record, device)[0]
    needs_small_tiles = needs_small_key_tiles(record)
    block_kv = 32 if needs_small_tiles else 64
    config = make_config(record, device, block_kv, 4, 2 if needs_small_tiles else 3)
    config = shrink_to_shared_memory(record, config, gpu_of(device))
    tile_within_page = paged_cache.page_size(record) % config.block_kv == 0
    if query_rows_per_tile(record, device) == 1 and not needs_small_tiles and not tile_within_page:
        # Loading a page index per key gives 3359 GB/s instead of 3081 (docs/lab/paged_attention_gpu.md).
        # With two warps, the page indices of a tile need no separate pipeline stage, so that two tiles of keys and
        # values are in flight instead of one with four warps.
        return shrink_to_shared_memory(record, make_config(record, device, 64, 2, 3), gpu_of(device))
    return dataclasses.replace(config, tile_within_page=tile_within_page)


def candidates(record: PagedAttention, device: DeviceInfo, direction: Direction) -> tuple[PagedForward, ...]:
    """Returns tile sizes worth measuring for a record on a device."""
    if record.latent is not None:
        return _latent_candidates(record, device)
    if max_score_rows(record, device) == PREFILL_SCORE_ROWS:
        return _prefill_candidates(record, device)
    options = ((32, 4, 2), (64, 2, 3), (64, 2, 4), (64, 4, 3), (128, 4, 2), (128, 4, 3))
    configs = [
        shrink_to_shared_memory(record, make_config(record, device, *option), gpu_of(device)) for option in options
    ]
    return tuple(
        dict.fromkeys(
            dataclasses.replace(x, tile_within_page=tile_within_page)
            for x in configs
            for tile_within_page in (False, True)
        )
    )


def shared_memory_refusal(record: PagedAttention, device: DeviceInfo) -> str:
    """Returns why the kernel cannot run for a record on a device; empty where it can."""
    chip, config = gpu_of(device), heuristic(record, device, "forward")
    if fits_shared_memory(record, config, chip):
        return ""
    needed_bytes = shared_memory_bytes(record, config, chip)
    return f"a tile takes up to {needed_bytes} bytes of shared memory, and {chip.target} has {chip.shared_memory}"


def _latent_candidates(record: PagedAttention, device: DeviceInfo) -> tuple[PagedForward, ...]:
    """Returns tile sizes for latent caches: key tile, warps, stages and programs per multiprocessor, the best guess
    first.
    """
    chip = gpu_of(device)
    group = query_heads_per_tile(record, chip)
    score_rows, head_tiles = query_rows_per_tile(record, device) * group, record.query.shape[1] // group
    options = (
        LATENT_TILES_FEW_ROWS
        if score_rows <= 16
        else LATENT_TILES_SOME_ROWS
        if score_rows <= 32
        else LATENT_TILES_MANY_ROWS
    )
    configs: list[tuple[int, PagedForward]] = []
    for block_kv, warps, stages, programs_per_sm in options:
        num_programs = 3 if is_interpreting() else max(1, programs_per_sm * chip.multiprocessors // head_tiles)
        tile = make_config(record, device, block_kv, warps, stages)
        configs.append((programs_per_sm, dataclasses.replace(tile, num_programs=num_programs, tile_within_page=True)))
    fitting = [
        x
        for programs_per_sm, x in configs
        if programs_per_sm * shared_memory_bytes(record, x, chip) <= chip.shared_memory
    ]
    return tuple(dict.fromkeys(fitting or [shrink_to_shared_memory(record, configs[-1][1], chip)]))


def _prefill_candidates(record: PagedAttention, device: DeviceInfo) -> tuple[PagedForward, ...]:
    """Returns tile sizes for sequences with many query rows, the best guess first."""
    chip, page_size = gpu_of(device), paged_cache.page_size(record)
    configs = [make_config(record, device, *x) for x in PREFILL_TILES]
    fitting = [x for x in configs if fits_shared_memory(record, x, chip)]
    configs = fitting or [shrink_to_shared_memory(record, configs[-1], chip)]
    return tuple(dict.fromkeys(dataclasses.replace(x, tile_within_page=page_size % x.block_kv == 0) for x in configs))


def needs_small_key_tiles(record: PagedAttention) -> bool:
    """Returns whether tiles of 64 keys are too large for the pipeline."""
    return record.query.shape[-1] > 128 or record.query.dtype.itemsize > 2


def _average_query_rows(record: PagedAttention) -> int:
    """Returns the average number of query rows per sequence."""
    return 1 if record.query_start is None else cdiv(record.query.shape[0], max(1, record.kv_lens.shape[0]))


def max_score_rows(record: PagedAttention, device: DeviceInfo) -> int:
    """Returns the largest number of rows of a tile of scores."""
    # Twice as many, so that batches of decoding sequences with a few long ones keep the smaller tiles.
    has_many_rows = _average_query_rows(record) * query_heads_per_tile(record, gpu_of(device)) >= 2 * PREFILL_SCORE_ROWS
    return (
        PREFILL_SCORE_ROWS
        if has_many_rows and record.latent is None and not needs_small_key_tiles(record)
        else MAX_SCORE_ROWS
    )


def query_rows_per_tile(record: PagedAttention, device: DeviceInfo) -> int:
    """Returns query rows per tile: a power of two for which the rows of all heads fit a tile of scores."""
    max_rows = max(1, max_score_rows(record, device) // query_heads_per_tile(record, gpu_of(device)))
    return min(pad_to_power_of_two(_average_query_rows(record)), 1 << (max_rows.bit_length() - 1))


def make_config(record: PagedAttention, device: DeviceInfo, block_kv: int, warps: int, stages: int) -> PagedForward:
    # The interpreter runs programs one after the other; a few suffice to test splits and merges.
    num_programs = 3 if is_interpreting() else RESIDENT_PROGRAMS_PER_SM * gpu_of(device).multiprocessors
    return PagedForward(
        block_q=query_rows_per_tile(record, device),
        block_kv=min(block_kv, 16) if is_interpreting() else block_kv,
        num_programs=num_programs,
        num_warps=warps,
        num_stages=stages,
    )


def partial_tile_stages(record: PagedAttention, stages: int) -> int:
    """Returns the pipeline stages of the loop over partial tiles.

    Biases of pairs are copied ahead like keys. With one stage less, they take the shared memory of that stage: decoding
    trees of 8 tokens in bfloat16 takes 114,688 bytes instead of 147,456, so that two programs fit a multiprocessor.
    """
    return stages if record.qq_bias is None or stages <= 2 else stages - 1


def query_heads_per_tile(record: PagedAttention, chip: Gpu) -> int:
    """Returns the query heads of a KV head per tile: all, or an equal part of them if they are too many for the
    chip.
    """
    group = record.query.shape[1] // paged_cache.kv_heads(record)
    max_heads = _max_heads_per_tile(record, chip)
    return next(
        group // num_tiles
        for num_tiles in range(1, group + 1)
        if group % num_tiles == 0 and group // num_tiles <= max_heads
    )


def _max_heads_per_tile(record: PagedAttention, chip: Gpu) -> int:
    is_float32 = max(record.query.dtype.itemsize, record.key_pages.dtype.itemsize) > 2
    if record.latent is not None:
        max_heads = MAX_FLOAT32_LATENT_HEADS_PER_TILE if is_float32 else MAX_LATENT_HEADS_PER_TILE
    else:
        max_heads = (
            min(MAX_HEADS_PER_TILE, max(16, MAX_FLOAT32_QUERY_ELEMENTS // pad_to_power_of_two(record.query.shape[-1])))
            if is_float32
            else MAX_HEADS_PER_TILE
        )
    if chip.vendor == "amd":
        return max_heads
    # The accumulator passes through shared memory in float32, for a power of two of heads.
    heads_in_shared_memory = (chip.shared_memory - KIBI) // (
        4 * pad_to_power_of_two(paged_cache.value_head_dim(record))
    )
    return min(max_heads, 1 << (heads_in_shared_memory.bit_length() - 1))


def shared_memory_bytes(record: PagedAttention, config: Any, chip: Gpu) -> int:
    """Returns the most bytes of shared memory that a program of the kernel takes.

    Args:
        record: The canonical arguments.
        config: Its `PagedForward`.
        chip: The GPU that the kernel runs on.
    """
    shape = _tile_shape(record, config, chip)
    return amd_shared_memory_bytes(shape) if chip.vendor == "amd" else nvidia_shared_memory_bytes(shape, chip)


def fits_shared_memory(record: PagedAttention, config: Any, chip: Gpu) -> bool:
    """Returns whether a program of the kernel fits the chip."""
    return shared_memory_bytes(record, config, chip) <= chip.shared_memory


def shrink_to_shared_memory(record: PagedAttention, config: Any, chip: Gpu) -> Any:
    """Returns the configuration with fewer stages, rows and keys until it fits the chip; the smallest one if none
    fits.
    """
    while not fits_shared_memory(record, config, chip):
        rows = pad_to_power_of_two(config.block_q * query_heads_per_tile(record, chip), MIN_TILE)
        if config.num_stages > 2:
            config = dataclasses.replace(config, num_stages=config.num_stages - 1)
        elif config.block_q > 1 and rows > 2 * MIN_TILE:
            config = dataclasses.replace(config, block_q=config.block_q // 2)
        elif config.block_kv > MIN_TILE:
            config = dataclasses.replace(config, block_kv=config.block_kv // 2)
        elif config.block_q > 1:
            config = dataclasses.replace(config, block_q=config.block_q // 2)
        elif config.num_stages > 1:
            config = dataclasses.replace(config, num_stages=1)
        else:
            return config
    return config


def _tile_shape(record: PagedAttention, config: Any, chip: Gpu) -> TileShape:
    head_dim, padded_value_dim = (
        record.query.shape[-1],
        pad_to_power_of_two(paged_cache.value_head_dim(record), MIN_TILE),
    )
    latent_dim = 0 if record.latent is None else record.latent[0]
    padded_head_dim = (
        pad_to_power_of_two(latent_dim, MIN_TILE) + pad_to_power_of_two(head_dim - latent_dim, MIN_TILE)
        if latent_dim
        else pad_to_power_of_two(head_dim, MIN_TILE)
    )
    query_itemsize, cache_itemsize = record.query.dtype.itemsize, record.key_pages.dtype.itemsize
    operand_itemsize = query_itemsize if cache_itemsize == 1 else max(query_itemsize, cache_itemsize)
    compute_itemsize = 0 if record.compute_dtype is None else jnp.dtype(record.compute_dtype).itemsize
    return TileShape(
        score_rows=pad_to_power_of_two(config.block_q * query_heads_per_tile(record, chip), MIN_TILE),
        block_kv=config.block_kv,
        padded_head_dim=padded_head_dim,
        # A latent vector is both key and value.
        padded_columns_loaded_per_key=padded_head_dim if latent_dim else padded_head_dim + padded_value_dim,
        padded_value_dim=pad_to_power_of_two(latent_dim, MIN_TILE) if latent_dim else padded_value_dim,
        cache_itemsize=cache_itemsize,
        operand_itemsize=max(operand_itemsize, compute_itemsize),
        converts_operands=cache_itemsize < operand_itemsize or compute_itemsize > 0,
        bias_itemsize=0 if record.qq_bias is None else record.qq_bias.dtype.itemsize,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        partial_tile_stages=partial_tile_stages(record, config.num_stages),
        stores_splits=config.batch_invariant,
    )
