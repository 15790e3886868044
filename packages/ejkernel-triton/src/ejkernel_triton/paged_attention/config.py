"""Tile sizes and launch parameters of the paged-attention kernels."""

import dataclasses

from ejkernel.families.paged_attention import PagedAttention
from ejkernel.families.paged_attention import pages as paged_cache
from ejkernel.ops.device import DeviceInfo
from ejkernel.ops.params import Direction
from ejkernel_triton.chips import chip_of
from ejkernel_triton.launch import interpreting
from ejkernel_triton.paged_attention.groups import group_of
from ejkernel_triton.paged_attention.shared_memory import fits, fitted, shared_memory
from ejkernel_triton.sizes import padded


@dataclasses.dataclass(frozen=True, kw_only=True)
class PagedForward:
    """Configuration of the paged-attention kernels.

    Attributes:
        block_q: Query rows of one sequence a tile; with all query heads of a KV head they make a tile of scores.
        block_kv: Keys a tile.
        num_programs: Persistent programs, each with an equal share of the key tiles of a call (stream-K).
        num_warps: Warps a program.
        num_stages: Pipeline stages of the copies of key and value tiles.
        whole_pages: Whether a tile that lies in one page reads the page's number once, not for every key.
    """

    block_q: int
    block_kv: int
    num_programs: int
    num_warps: int
    num_stages: int
    whole_pages: bool = False


FACES = {
    "q_blocksize": "block_q",
    "kv_blocksize": "block_kv",
    "block_k": "block_kv",
    "num_warps": "num_warps",
    "num_stages": "num_stages",
}
"""Fields of the public configurations and what they set here."""

SCORE_ROWS = 64
"""Most rows of a tile of scores in decoding and short prefills."""

PREFILL_SCORE_ROWS = 128
"""Rows of a tile of scores in prefill: long queries, heads of at most 128 columns, elements of 16 bits."""

PREFILL = ((64, 8, 3), (64, 8, 2), (32, 8, 4), (32, 8, 2))
"""Key tile, warps and stages for tiles of `PREFILL_SCORE_ROWS`, the fastest on an H200 first.

Chunks of 512: 315, 234, 275 and 179 TFLOP/s (docs/lab/paged_attention_gpu.md). Four warps, or 128 keys, spill.
"""

SMALL_LATENT = ((32, 4, 3, 2), (32, 4, 2, 2), (16, 4, 2, 2), (16, 4, 1, 2))
LATENT_FEW = ((64, 4, 3, 1), *SMALL_LATENT)
LATENT_SOME = ((64, 8, 3, 1), *SMALL_LATENT)
LATENT_MANY = ((64, 8, 2, 1), (32, 8, 3, 1), (32, 8, 2, 1), (64, 8, 1, 1), (16, 8, 2, 1), (16, 8, 1, 1))
"""Key tile, warps, stages and programs a multiprocessor for at most 16, at most 32 and more rows of scores in a latent
cache, the fastest on an H200 first."""

PROGRAMS_PER_SM = 2
"""Programs that a multiprocessor's registers hold at once."""


def heuristic(record: PagedAttention, device: DeviceInfo, direction: Direction) -> PagedForward:
    """Tile sizes for a record on a device: many rows a tile where sequences have many, else as few as can be."""
    if record.latent is not None:
        return _latent_candidates(record, device)[0]
    if _score_rows(record, device) == PREFILL_SCORE_ROWS:
        return _prefill_candidates(record, device)[0]
    wide = _is_wide(record)
    block_kv = 32 if wide else 64
    sized = fitted(record, _sized(record, device, block_kv, 4, 2 if wide else 3), chip_of(device))
    whole = paged_cache.page_size(record) % sized.block_kv == 0
    if _query_rows(record, device) == 1 and not wide and not whole:
        # With a number for every key 3359 GB/s instead of 3081 (docs/lab/paged_attention_gpu.md).
        # Two warps read the page numbers of a tile without a pipeline stage of their own, so that two tiles of keys
        # and values are in flight where four warps have one.
        return fitted(record, _sized(record, device, 64, 2, 3), chip_of(device))
    return dataclasses.replace(sized, whole_pages=whole)


def candidates(record: PagedAttention, device: DeviceInfo, direction: Direction) -> tuple[PagedForward, ...]:
    """Tile sizes worth measuring for a record on a device."""
    if record.latent is not None:
        return _latent_candidates(record, device)
    if _score_rows(record, device) == PREFILL_SCORE_ROWS:
        return _prefill_candidates(record, device)
    options = ((32, 4, 2), (64, 2, 3), (64, 2, 4), (64, 4, 3), (128, 4, 2), (128, 4, 3))
    sized = [fitted(record, _sized(record, device, *option), chip_of(device)) for option in options]
    return tuple(dict.fromkeys(dataclasses.replace(x, whole_pages=whole) for x in sized for whole in (False, True)))


def too_large(record: PagedAttention, device: DeviceInfo) -> str:
    """Why the kernel cannot run for a record on a device; empty where it can."""
    chip, smallest = chip_of(device), heuristic(record, device, "forward")
    if fits(record, smallest, chip):
        return ""
    took = shared_memory(record, smallest, chip)
    return f"a tile takes up to {took} bytes of shared memory, and {chip.target} has {chip.shared_memory}"


def _latent_candidates(record: PagedAttention, device: DeviceInfo) -> tuple[PagedForward, ...]:
    """Tile sizes for latent caches: key tile, warps, stages and programs of a multiprocessor, the best guess first."""
    chip = chip_of(device)
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
    """Tile sizes for sequences with many query rows, the best guess first."""
    chip, page = chip_of(device), paged_cache.page_size(record)
    sized = [_sized(record, device, *x) for x in PREFILL]
    sized = [x for x in sized if fits(record, x, chip)] or [fitted(record, sized[-1], chip)]
    return tuple(dict.fromkeys(dataclasses.replace(x, whole_pages=page % x.block_kv == 0) for x in sized))


def _is_wide(record: PagedAttention) -> bool:
    """Whether tiles of 64 keys are too large for the pipeline."""
    return record.query.shape[-1] > 128 or record.query.dtype.itemsize > 2


def _average_query_rows(record: PagedAttention) -> int:
    """Query rows of a sequence."""
    return 1 if record.query_start is None else -(-record.query.shape[0] // max(1, record.kv_lens.shape[0]))


def _score_rows(record: PagedAttention, device: DeviceInfo) -> int:
    """Most rows of a tile of scores."""
    # Twice as many, so that batches of decoding sequences with a few long ones among them keep the smaller tiles.
    many = _average_query_rows(record) * group_of(record, chip_of(device)) >= 2 * PREFILL_SCORE_ROWS
    return PREFILL_SCORE_ROWS if many and record.latent is None and not _is_wide(record) else SCORE_ROWS


def _query_rows(record: PagedAttention, device: DeviceInfo) -> int:
    """Query rows of a tile: a power of two, with all heads no more than a tile of scores has rows."""
    most = max(1, _score_rows(record, device) // group_of(record, chip_of(device)))
    return min(padded(_average_query_rows(record)), 1 << (most.bit_length() - 1))


def _sized(record: PagedAttention, device: DeviceInfo, block_kv: int, warps: int, stages: int) -> PagedForward:
    # The interpreter runs programs one after the other: a few, so that rows are shared and merged there too.
    programs = 3 if interpreting() else PROGRAMS_PER_SM * chip_of(device).multiprocessors
    return PagedForward(
        block_q=_query_rows(record, device),
        block_kv=min(block_kv, 16) if interpreting() else block_kv,
        num_programs=programs,
        num_warps=warps,
        num_stages=stages,
    )
