"""How many blocks share the keys of a row: which number is used when nobody chose, and which are worth measuring."""

import dataclasses

from ejkernel.families.paged_attention import PagedAttention, band
from ejkernel.ops.config.params import Direction
from ejkernel.ops.device import DeviceInfo
from ejkernel.planning import paged_cache

HEADS = 16
"""Query heads of a KV head that a block serves."""

CHIPS = {8.0: (108, 164), 8.6: (84, 100), 8.9: (142, 100), 9.0: (132, 228), 10.0: (148, 228), 12.0: (170, 100)}
"""Multiprocessors of the largest chip of a compute capability, and the KiB of shared memory of each of them."""

SHORTEST = 256
"""Keys that a block should have at least, so that starting and merging it does not show."""

LONG = 4096
"""Keys that a block has at least where splits are there to even out the rows."""

WAVES = 3
"""Waves that even them out."""

MOST = 64
"""Splits that the kernels can merge."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodeSplits:
    """The configuration of the kernels.

    Attributes:
        num_splits: Blocks that share the keys of a row.
    """

    num_splits: int


FACES: dict[str, str] = dict.fromkeys(("num_key_splits", "num_kv_splits", "num_splits"), "num_splits")
"""What public configurations call them."""


def heuristic(record: PagedAttention, device: DeviceInfo, direction: Direction) -> DecodeSplits:
    """The fewest splits that keep the chip about as busy as it can be kept.

    Blocks run in waves of as many as the chip holds, and the last wave is rarely full: the fuller, the better. Rows are
    of other lengths than one another, which some waves even out; for rows of one length they cost little.
    """
    multiprocessors, shared = CHIPS.get(device.compute_capability or 9.0, CHIPS[9.0])
    slots = multiprocessors * (shared // (_shared(record) + 1))  # of each block's, the driver keeps one for itself
    blocks, limit = _blocks(record), most(record)
    uneven = min(-(-WAVES * slots // blocks), _keys(record) // LONG) if record.query.shape[0] > 1 else 1
    busy = {n: _fullness(blocks * n, slots) for n in range(max(1, min(uneven, limit)), limit + 1)}
    enough = 0.95 * max(busy.values())
    return DecodeSplits(num_splits=next(n for n, fullness in busy.items() if fullness >= enough))


def candidates(record: PagedAttention, device: DeviceInfo, direction: Direction) -> tuple[DecodeSplits, ...]:
    """Powers of two."""
    limit = most(record)
    return tuple(DecodeSplits(num_splits=1 << n) for n in range(limit.bit_length()))


def most(record: PagedAttention) -> int:
    """The most splits that make sense for a record."""
    return max(1, min(MOST, _keys(record) // SHORTEST))


def _keys(record: PagedAttention) -> int:
    """The most keys that a row can attend to, as far as shape and window tell."""
    left, _ = band(record)
    keys = record.key_pages.shape[1]
    return keys if left is None else min(keys, left + 1)


def _blocks(record: PagedAttention) -> int:
    rows, heads, _ = record.query.shape
    kv_heads = record.key_pages.shape[2]
    return rows * kv_heads * -(-heads // kv_heads // HEADS)


def _shared(record: PagedAttention) -> int:
    """KiB of shared memory that a block takes."""
    return 48 if max(record.query.shape[-1], paged_cache.value_size(record)) <= 64 else 96


def _fullness(blocks: int, slots: int) -> float:
    return blocks / (-(-blocks // slots) * slots)
