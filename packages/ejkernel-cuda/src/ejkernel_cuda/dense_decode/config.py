"""Split-KV: how many blocks share the keys of a row; the heuristic, and the candidates that are worth measuring."""

import dataclasses

from ejkernel.families.paged_attention import PagedAttention, band
from ejkernel.families.paged_attention import pages as paged_cache
from ejkernel.ops.chips import KIBI, gpu_of
from ejkernel.ops.device import DeviceInfo
from ejkernel.ops.params import Direction

HEADS_PER_BLOCK = 16
"""Query heads of one KV head in a block: the rows of an MMA tile."""

MIN_SPLIT_KEYS = 256
"""Fewest keys of a split, so that the cost of starting and merging a block stays small."""

MIN_UNEVEN_KEYS = 4096
"""Fewest keys of a split where splits balance rows of different lengths."""

UNEVEN_WAVES = 3
"""Waves of blocks that balance rows of different lengths."""

MAX_SPLITS = 64
"""Splits that the kernels can merge."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodeSplits:
    """The configuration of the kernels.

    Attributes:
        num_splits: Blocks that share the keys of a row.
    """

    num_splits: int


FACES: dict[str, str] = dict.fromkeys(("num_key_splits", "num_kv_splits", "num_splits"), "num_splits")
"""Fields of the public configurations that set the number of splits."""


def heuristic(record: PagedAttention, device: DeviceInfo, direction: Direction) -> DecodeSplits:
    """The fewest splits that keep the chip about as busy as it can be kept.

    Wave quantisation: blocks run in waves of as many as the chip holds, and a partly empty tail wave wastes its rest.
    Rows differ in length, which several waves balance; for rows of one length those cost little.
    """
    chip = gpu_of(device)
    # The driver keeps 1 KiB for each block.
    wave_blocks = chip.multiprocessors * (chip.total_shared_memory // KIBI // (_shared(record) + 1))
    blocks, limit = _blocks(record), max_splits(record)
    # Rows of different lengths leave parts of a wave idle. Several waves of shorter blocks balance that, as long as a
    # split keeps enough keys; a single row has nothing to balance.
    min_splits = (
        min(-(-UNEVEN_WAVES * wave_blocks // blocks), _keys(record) // MIN_UNEVEN_KEYS)
        if record.query.shape[0] > 1
        else 1
    )
    occupied = {n: _fullness(blocks * n, wave_blocks) for n in range(max(1, min(min_splits, limit)), limit + 1)}
    # Fewer splits merge fewer partial sums, so the last 5% of occupancy are not worth more of them.
    enough = 0.95 * max(occupied.values())
    return DecodeSplits(num_splits=next(n for n, fullness in occupied.items() if fullness >= enough))


def candidates(record: PagedAttention, device: DeviceInfo, direction: Direction) -> tuple[DecodeSplits, ...]:
    """Powers of two up to the most splits of a record."""
    limit = max_splits(record)
    return tuple(DecodeSplits(num_splits=1 << n) for n in range(limit.bit_length()))


def max_splits(record: PagedAttention) -> int:
    """The most splits that make sense for a record."""
    return max(1, min(MAX_SPLITS, _keys(record) // MIN_SPLIT_KEYS))


def _keys(record: PagedAttention) -> int:
    """The most keys that a row can attend to, as far as shape and window tell."""
    left, _ = band(record)
    keys = record.key_pages.shape[1]
    return keys if left is None else min(keys, left + 1)


def _blocks(record: PagedAttention) -> int:
    rows, heads, _ = record.query.shape
    kv_heads = record.key_pages.shape[2]
    return rows * kv_heads * -(-heads // kv_heads // HEADS_PER_BLOCK)


def _shared(record: PagedAttention) -> int:
    """KiB of shared memory that a block takes."""
    # As `Shape` in csrc/split_decode.cuh: warps times stages times tiles of keys and values.
    return 48 if max(record.query.shape[-1], paged_cache.value_size(record)) <= 64 else 96


def _fullness(blocks: int, wave_blocks: int) -> float:
    return blocks / (-(-blocks // wave_blocks) * wave_blocks)
