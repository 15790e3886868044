"""The split of keys over blocks, the heuristic and the candidates."""

import dataclasses

from ejkernel.arithmetic import cdiv
from ejkernel.families.lightning_indexer import LightningIndexer
from ejkernel.ops.chips import gpu_of
from ejkernel.ops.device import DeviceInfo
from ejkernel.ops.params import Direction

CHANNELS = 128
"""The channels that the kernel is compiled for (csrc/lightning_indexer/call.cuh)."""
ROWS_PER_BLOCK, KEYS_PER_STEP = 256, 128
"""Rows of queries and heads of a block, and keys of a step."""
MAX_SPLIT_KEYS, MIN_SPLIT_KEYS = 2048, 1024
"""The most and fewest keys that a block multiplies with the same queries, unless there are fewer."""
ITEMS_PER_MULTIPROCESSOR = 8
"""Items of work per multiprocessor from which on larger splits are preferred: the last ones leave few idle."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class KeySplits:
    """The configuration of the kernel of the scores.

    Attributes:
        split_keys: Keys that a block multiplies with the same queries; a multiple of 128.
    """

    split_keys: int

    def __post_init__(self) -> None:
        """Raises ValueError for keys that are no whole steps."""
        if self.split_keys < 1 or self.split_keys % KEYS_PER_STEP:
            raise ValueError(f"split_keys: got {self.split_keys}, wants a multiple of {KEYS_PER_STEP} above 0")


PUBLIC_FIELDS: dict[str, str] = {}
"""No field of the public configuration is one of this kernel's."""


def heuristic(record: LightningIndexer, device: DeviceInfo, direction: Direction) -> KeySplits:
    """Returns the largest splits that give every multiprocessor several items, at most 2048 keys.

    2048 queries of 64 heads and 32768 keys take 1.17 ms on an H200 with 2048 keys per split, 1.19 with 1024, 1.21 with
    4096 and 1.51 with 8192.
    """
    (batch, tokens, heads, _), keys = record.query.shape, record.key.shape[1]
    groups, split_keys = batch * cdiv(tokens * heads, ROWS_PER_BLOCK), MAX_SPLIT_KEYS
    enough = ITEMS_PER_MULTIPROCESSOR * gpu_of(device).multiprocessors
    while split_keys > MIN_SPLIT_KEYS and groups * cdiv(keys, split_keys) < enough:
        split_keys //= 2
    return KeySplits(split_keys=split_keys)


def candidates(record: LightningIndexer, device: DeviceInfo, direction: Direction) -> tuple[KeySplits, ...]:
    """Returns the heuristic's splits, and others worth measuring."""
    sizes = (8 * MAX_SPLIT_KEYS, 4 * MAX_SPLIT_KEYS, 2 * MAX_SPLIT_KEYS, MAX_SPLIT_KEYS, MIN_SPLIT_KEYS)
    others = (KeySplits(split_keys=x) for x in sizes)
    return tuple(dict.fromkeys((heuristic(record, device, direction), *others)))
