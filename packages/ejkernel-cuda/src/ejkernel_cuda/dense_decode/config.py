"""The split-KV configuration of dense decode attention: its type, the heuristic and the candidates."""

import dataclasses

from ejkernel.arithmetic import cdiv
from ejkernel.families.paged_attention import PagedAttention, causal_window_bounds
from ejkernel.families.paged_attention import pages as paged_cache
from ejkernel.ops.chips import KIBI, gpu_of
from ejkernel.ops.device import DeviceInfo
from ejkernel.ops.params import Direction

HEADS_PER_BLOCK = 16
"""Query heads per block, all of one KV head: the rows of an MMA tile."""

MIN_KEYS_PER_SPLIT = 256
"""The smallest number of keys per split, so that starting and merging a block stays cheap."""

MIN_KEYS_PER_BALANCING_SPLIT = 4096
"""The smallest number of keys per split where splits balance rows of different lengths."""

MIN_WAVES_FOR_BALANCE = 3
"""Waves of blocks that suffice to balance rows of different lengths."""

MAX_SPLITS = 64
"""The largest number of splits that the kernels can merge."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodeSplits:
    """The configuration of the kernels.

    Attributes:
        num_splits: Number of blocks that the keys of a row are split over.
    """

    num_splits: int


PUBLIC_FIELDS: dict[str, str] = dict.fromkeys(("num_key_splits", "num_kv_splits", "num_splits"), "num_splits")
"""Maps the fields of the public configurations to the number of splits."""


def heuristic(record: PagedAttention, device: DeviceInfo, direction: Direction) -> DecodeSplits:
    """Returns the smallest number of splits that keeps the chip close to its best occupancy.

    Blocks run in waves of as many as the chip holds, and a partly empty tail wave wastes the rest (wave quantisation).
    Rows of different lengths need several waves for balance; rows of one length lose little by them.
    """
    chip = gpu_of(device)
    # The driver reserves 1 KiB per block.
    blocks_per_wave = chip.multiprocessors * (chip.total_shared_memory // KIBI // (_shared_memory_kib(record) + 1))
    blocks, limit = _num_blocks_without_split(record), max_splits(record)
    # Rows of different lengths leave a wave partly idle. Several waves of shorter blocks balance that, as long as a
    # split has enough keys; a single row needs no balance.
    min_splits = (
        min(
            cdiv(MIN_WAVES_FOR_BALANCE * blocks_per_wave, blocks),
            _max_keys_per_row(record) // MIN_KEYS_PER_BALANCING_SPLIT,
        )
        if record.query.shape[0] > 1
        else 1
    )
    occupancies = {
        n: _wave_occupancy(blocks * n, blocks_per_wave) for n in range(max(1, min(min_splits, limit)), limit + 1)
    }
    # Fewer splits have fewer partial sums to merge, which outweighs the last 5% of occupancy.
    min_occupancy = 0.95 * max(occupancies.values())
    return DecodeSplits(num_splits=next(n for n, occupancy in occupancies.items() if occupancy >= min_occupancy))


def candidates(record: PagedAttention, device: DeviceInfo, direction: Direction) -> tuple[DecodeSplits, ...]:
    """Returns the powers of two up to the largest number of splits for a record."""
    limit = max_splits(record)
    return tuple(DecodeSplits(num_splits=1 << n) for n in range(limit.bit_length()))


def max_splits(record: PagedAttention) -> int:
    """Returns the largest number of splits that leaves each enough keys."""
    return max(1, min(MAX_SPLITS, _max_keys_per_row(record) // MIN_KEYS_PER_SPLIT))


def _max_keys_per_row(record: PagedAttention) -> int:
    """Returns an upper bound on the keys that a row attends to, from shapes and window."""
    left, _ = causal_window_bounds(record)
    keys = record.key_pages.shape[1]
    return keys if left is None else min(keys, left + 1)


def _num_blocks_without_split(record: PagedAttention) -> int:
    rows, heads, _ = record.query.shape
    kv_heads = record.key_pages.shape[2]
    return rows * kv_heads * cdiv(heads // kv_heads, HEADS_PER_BLOCK)


def _shared_memory_kib(record: PagedAttention) -> int:
    """Returns the shared memory of a block, in KiB."""
    # Matches `Shape` in csrc: warps times stages times tiles of keys and values.
    return 48 if max(record.query.shape[-1], paged_cache.value_head_dim(record)) <= 64 else 96


def _wave_occupancy(blocks: int, blocks_per_wave: int) -> float:
    return blocks / (cdiv(blocks, blocks_per_wave) * blocks_per_wave)
