"""Tile sizes and launch parameters of the paged-attention kernels, and the tiles that shared memory holds.

Triton's compiler determines the shared memory of a kernel; `shared_memory` is an upper bound for its versions 3.6 and
3.9, which a test compares with them. In the main loop shared memory holds the queries, the pipeline stages of keys and
values (and of biases of pairs), operands that are converted to another dtype, and the weights. After it, the
accumulator passes through shared memory to the threads that store it.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp

from ejkernel.arithmetic import cdiv
from ejkernel.families.paged_attention import PagedAttention
from ejkernel.families.paged_attention import pages as paged_cache
from ejkernel.ops.chips import KIBI, Gpu, gpu_of
from ejkernel.ops.device import DeviceInfo
from ejkernel.ops.params import Direction
from ejkernel_triton.launch import interpreting
from ejkernel_triton.sizes import (
    padded,
)


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
        whole_pages: Whether a tile is within one page, so that its index is loaded once, not for every key.
    """

    block_q: int
    block_kv: int
    num_programs: int
    num_warps: int
    num_stages: int
    whole_pages: bool = False


PUBLIC_FIELDS = {
    "q_blocksize": "block_q",
    "kv_blocksize": "block_kv",
    "block_k": "block_kv",
    "num_warps": "num_warps",
    "num_stages": "num_stages",
}
"""Maps fields of the public configurations to fields of this one."""

SCORE_ROWS = 64
"""The largest number of rows of a tile of scores in decoding and short prefills."""

PREFILL_SCORE_ROWS = 128
"""Rows of a tile of scores in prefill: long queries, heads of at most 128 columns, 16-bit elements."""

PREFILL = ((64, 8, 3), (64, 8, 2), (32, 8, 4), (32, 8, 2))
"""Key tile, warps and stages for tiles of `PREFILL_SCORE_ROWS`, the fastest on an H200 first.

Chunks of 512: 315, 234, 275 and 179 TFLOP/s (docs/lab/paged_attention_gpu.md). Four warps, or 128 keys, spill.
"""

SMALL_LATENT = ((32, 4, 3, 2), (32, 4, 2, 2), (16, 4, 2, 2), (16, 4, 1, 2))
LATENT_FEW = ((64, 4, 3, 1), *SMALL_LATENT)
LATENT_SOME = ((64, 8, 3, 1), *SMALL_LATENT)
LATENT_MANY = ((64, 8, 2, 1), (32, 8, 3, 1), (32, 8, 2, 1), (64, 8, 1, 1), (16, 8, 2, 1), (16, 8, 1, 1))
"""Key tile, warps, stages and programs per multiprocessor for at most 16, at most 32 and more rows of scores in a
latent cache, the fastest on an H200 first.
"""

PROGRAMS_PER_SM = 2
"""Programs per multiprocessor that registers allow."""

HEADS, LATENT_HEADS, FLOAT32_LATENT_HEADS = 128, 64, 16
"""The largest number of query heads of one KV head in a tile. Accumulators of 128 heads and 512 latent columns would
fill the registers of a multiprocessor. Two programs of 64 heads each read the same keys at about the same time, once
from HBM.
"""

FLOAT32_QUERIES = 8 * KIBI
"""The largest number of elements of a tile of float32 queries, which shared memory holds split in two."""

MIN_TILE = 16
"""The smallest side of a tile that `tl.dot` supports."""

WGMMA_ROWS, WGMMA_WARPS = 64, 4
"""Rows and warps from which on Hopper uses WGMMA, which reads shared memory, so that it holds every stage."""

BARRIERS = KIBI
"""Bytes for the copies' mbarriers, and for maxima and sums across warps."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TileShape:
    """The sizes that determine the shared memory of a program.

    Attributes:
        rows: Rows of scores.
        keys: Keys per tile.
        query_columns: Padded columns of queries, and of keys.
        read_columns: Padded columns that are loaded per key, including those of its value.
        value_columns: Padded columns of the accumulator.
        stored: Bytes per element of the cache.
        operand: Bytes per element of the products' operands.
        converted: Whether operands have another dtype than the cache.
        bias: Bytes per element of the biases of pairs, which are copied like keys; 0 without them.
        warps: Warps per program.
        stages: Pipeline stages.
        partial_stages: Those of the loop over partial tiles.
    """

    rows: int
    keys: int
    query_columns: int
    read_columns: int
    value_columns: int
    stored: int
    operand: int
    converted: bool
    bias: int
    warps: int
    stages: int
    partial_stages: int


def heuristic(record: PagedAttention, device: DeviceInfo, direction: Direction) -> PagedForward:
    """Returns the default tile sizes: many query rows per tile if sequences have many, otherwise as few as possible."""
    if record.latent is not None:
        return _latent_candidates(record, device)[0]
    if _score_rows(record, device) == PREFILL_SCORE_ROWS:
        return _prefill_candidates(record, device)[0]
    wide = _is_wide(record)
    block_kv = 32 if wide else 64
    sized = fitted(record, _sized(record, device, block_kv, 4, 2 if wide else 3), gpu_of(device))
    whole = paged_cache.page_size(record) % sized.block_kv == 0
    if _query_rows(record, device) == 1 and not wide and not whole:
        # Loading a page index per key gives 3359 GB/s instead of 3081 (docs/lab/paged_attention_gpu.md).
        # With two warps, the page indices of a tile need no separate pipeline stage, so that two tiles of keys and
        # values are in flight instead of one with four warps.
        return fitted(record, _sized(record, device, 64, 2, 3), gpu_of(device))
    return dataclasses.replace(sized, whole_pages=whole)


def candidates(record: PagedAttention, device: DeviceInfo, direction: Direction) -> tuple[PagedForward, ...]:
    """Returns tile sizes worth measuring for a record on a device."""
    if record.latent is not None:
        return _latent_candidates(record, device)
    if _score_rows(record, device) == PREFILL_SCORE_ROWS:
        return _prefill_candidates(record, device)
    options = ((32, 4, 2), (64, 2, 3), (64, 2, 4), (64, 4, 3), (128, 4, 2), (128, 4, 3))
    sized = [fitted(record, _sized(record, device, *option), gpu_of(device)) for option in options]
    return tuple(dict.fromkeys(dataclasses.replace(x, whole_pages=whole) for x in sized for whole in (False, True)))


def too_large(record: PagedAttention, device: DeviceInfo) -> str:
    """Returns why the kernel cannot run for a record on a device; empty where it can."""
    chip, smallest = gpu_of(device), heuristic(record, device, "forward")
    if fits(record, smallest, chip):
        return ""
    took = shared_memory(record, smallest, chip)
    return f"a tile takes up to {took} bytes of shared memory, and {chip.target} has {chip.shared_memory}"


def _latent_candidates(record: PagedAttention, device: DeviceInfo) -> tuple[PagedForward, ...]:
    """Returns tile sizes for latent caches: key tile, warps, stages and programs per multiprocessor, the best guess
    first.
    """
    chip = gpu_of(device)
    group = group_of(record, chip)
    rows, splits = _query_rows(record, device) * group, record.query.shape[1] // group
    options = LATENT_FEW if rows <= 16 else LATENT_SOME if rows <= 32 else LATENT_MANY
    sized: list[tuple[int, PagedForward]] = []
    for block_kv, warps, stages, per_sm in options:
        programs = 3 if interpreting() else max(1, per_sm * chip.multiprocessors // splits)
        tile = _sized(record, device, block_kv, warps, stages)
        sized.append((per_sm, dataclasses.replace(tile, num_programs=programs, whole_pages=True)))
    fitting = [x for per_sm, x in sized if per_sm * shared_memory(record, x, chip) <= chip.shared_memory]
    return tuple(dict.fromkeys(fitting or [fitted(record, sized[-1][1], chip)]))


def _prefill_candidates(record: PagedAttention, device: DeviceInfo) -> tuple[PagedForward, ...]:
    """Returns tile sizes for sequences with many query rows, the best guess first."""
    chip, page = gpu_of(device), paged_cache.page_size(record)
    sized = [_sized(record, device, *x) for x in PREFILL]
    sized = [x for x in sized if fits(record, x, chip)] or [fitted(record, sized[-1], chip)]
    return tuple(dict.fromkeys(dataclasses.replace(x, whole_pages=page % x.block_kv == 0) for x in sized))


def _is_wide(record: PagedAttention) -> bool:
    """Returns whether tiles of 64 keys are too large for the pipeline."""
    return record.query.shape[-1] > 128 or record.query.dtype.itemsize > 2


def _average_query_rows(record: PagedAttention) -> int:
    """Returns the average number of query rows per sequence."""
    return 1 if record.query_start is None else cdiv(record.query.shape[0], max(1, record.kv_lens.shape[0]))


def _score_rows(record: PagedAttention, device: DeviceInfo) -> int:
    """Returns the largest number of rows of a tile of scores."""
    # Twice as many, so that batches of decoding sequences with a few long ones keep the smaller tiles.
    many = _average_query_rows(record) * group_of(record, gpu_of(device)) >= 2 * PREFILL_SCORE_ROWS
    return PREFILL_SCORE_ROWS if many and record.latent is None and not _is_wide(record) else SCORE_ROWS


def _query_rows(record: PagedAttention, device: DeviceInfo) -> int:
    """Returns query rows per tile: a power of two for which the rows of all heads fit a tile of scores."""
    most = max(1, _score_rows(record, device) // group_of(record, gpu_of(device)))
    return min(padded(_average_query_rows(record)), 1 << (most.bit_length() - 1))


def _sized(record: PagedAttention, device: DeviceInfo, block_kv: int, warps: int, stages: int) -> PagedForward:
    # The interpreter runs programs one after the other; a few suffice to test splits and merges.
    programs = 3 if interpreting() else PROGRAMS_PER_SM * gpu_of(device).multiprocessors
    return PagedForward(
        block_q=_query_rows(record, device),
        block_kv=min(block_kv, 16) if interpreting() else block_kv,
        num_programs=programs,
        num_warps=warps,
        num_stages=stages,
    )


def partial_stages(record: PagedAttention, stages: int) -> int:
    """Returns the pipeline stages of the loop over partial tiles.

    Biases of pairs are copied ahead like keys. With one stage less, they take the shared memory of that stage: decoding
    trees of 8 tokens in bfloat16 takes 114,688 bytes instead of 147,456, so that two programs fit a multiprocessor.
    """
    return stages if record.qq_bias is None or stages <= 2 else stages - 1


def group_of(record: PagedAttention, chip: Gpu) -> int:
    """Returns the query heads of a KV head per tile: all, or an equal part of them if they are too many for the
    chip.
    """
    group = record.query.shape[1] // paged_cache.kv_heads(record)
    most = _most_heads(record, chip)
    return next(group // parts for parts in range(1, group + 1) if group % parts == 0 and group // parts <= most)


def _most_heads(record: PagedAttention, chip: Gpu) -> int:
    wide = max(record.query.dtype.itemsize, record.key_pages.dtype.itemsize) > 2
    if record.latent is not None:
        most = FLOAT32_LATENT_HEADS if wide else LATENT_HEADS
    else:
        most = min(HEADS, max(16, FLOAT32_QUERIES // padded(record.query.shape[-1]))) if wide else HEADS
    if chip.vendor == "amd":
        return most
    # The accumulator passes through shared memory in float32, for a power of two of heads.
    held = (chip.shared_memory - KIBI) // (4 * padded(paged_cache.value_size(record)))
    return min(most, 1 << (held.bit_length() - 1))


def shared_memory(record: PagedAttention, config: Any, chip: Gpu) -> int:
    """Returns the most bytes of shared memory that a program of the kernel takes.

    Args:
        record: The canonical arguments.
        config: Its `PagedForward`.
        chip: What it runs on.
    """
    shape = _shape(record, config, chip)
    return _on_amd(shape) if chip.vendor == "amd" else _on_nvidia(shape, chip)


def fits(record: PagedAttention, config: Any, chip: Gpu) -> bool:
    """Returns whether a program of the kernel fits the chip."""
    return shared_memory(record, config, chip) <= chip.shared_memory


def fitted(record: PagedAttention, config: Any, chip: Gpu) -> Any:
    """Returns the configuration with fewer stages, rows and keys until it fits the chip; the smallest one if none
    fits.
    """
    while not fits(record, config, chip):
        rows = padded(config.block_q * group_of(record, chip), MIN_TILE)
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


def _shape(record: PagedAttention, config: Any, chip: Gpu) -> TileShape:
    size, values = record.query.shape[-1], padded(paged_cache.value_size(record), MIN_TILE)
    latent = 0 if record.latent is None else record.latent[0]
    columns = padded(latent, MIN_TILE) + padded(size - latent, MIN_TILE) if latent else padded(size, MIN_TILE)
    query, stored = record.query.dtype.itemsize, record.key_pages.dtype.itemsize
    operand = query if stored == 1 else max(query, stored)
    rounded = 0 if record.compute_dtype is None else jnp.dtype(record.compute_dtype).itemsize
    return TileShape(
        rows=padded(config.block_q * group_of(record, chip), MIN_TILE),
        keys=config.block_kv,
        query_columns=columns,
        # A latent vector is both key and value.
        read_columns=columns if latent else columns + values,
        value_columns=padded(latent, MIN_TILE) if latent else values,
        stored=stored,
        operand=max(operand, rounded),
        converted=stored < operand or rounded > 0,
        bias=0 if record.qq_bias is None else record.qq_bias.dtype.itemsize,
        warps=config.num_warps,
        stages=config.num_stages,
        partial_stages=partial_stages(record, config.num_stages),
    )


def _on_nvidia(shape: TileShape, chip: Gpu) -> int:
    wide, parts = shape.operand > 2, 2 if shape.operand > 2 else 1  # float32 operands are split in two
    unit = chip.architecture in ("hopper", "blackwell")
    wgmma = unit and shape.rows >= WGMMA_ROWS and shape.warps >= WGMMA_WARPS
    # On other chips the last stage goes to registers.
    last, tile = 0 if wgmma else 1, shape.keys * shape.read_columns
    buffers, partial = shape.stages - last, shape.partial_stages - last
    weights = parts * shape.rows * shape.keys * shape.operand
    if buffers > 0:
        converted = shape.converted or (wide and wgmma)
        biases = partial * shape.rows * shape.keys * shape.bias
        copied = max(buffers * shape.stored * tile, partial * shape.stored * tile + biases)
        loop = copied + shape.operand * converted * tile + weights
    else:
        # Tiles pass through shared memory from the threads that load them to those that multiply them.
        loop = max(weights, shape.keys * (shape.query_columns + shape.value_columns) * shape.operand)
    queries = parts * shape.rows * shape.query_columns * shape.operand
    return max(queries + loop, 4 * shape.rows * shape.value_columns) + BARRIERS


def _on_amd(shape: TileShape) -> int:
    """Returns the same for CDNA, where registers hold the queries, and 16-bit weights of 16 rows too."""
    # Both loops copy tiles of keys and values, and that over partial tiles those of biases too.
    tile, biases = shape.keys * shape.read_columns * shape.stored, shape.rows * shape.keys * shape.bias
    copied = max((shape.stages - 1) * tile, (shape.partial_stages - 1) * (tile + biases))
    if shape.rows > MIN_TILE or shape.operand > 2:
        copied += shape.rows * shape.keys * shape.operand
    # The accumulator is rounded before it passes through shared memory.
    return max(copied, shape.operand * shape.rows * shape.value_columns)
