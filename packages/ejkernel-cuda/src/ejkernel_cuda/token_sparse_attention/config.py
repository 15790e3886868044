"""The split of listed keys over blocks: its type, the heuristic and the candidates."""

import dataclasses
import math

from ejkernel.arithmetic import cdiv
from ejkernel.families.token_sparse_attention import TokenSparseAttention
from ejkernel.ops.chips import gpu_of
from ejkernel.ops.device import DeviceInfo
from ejkernel.ops.params import Direction

ROW_SIZE, VALUE_SIZE = 576, 512
"""The sizes of keys and values that the kernel is compiled for."""
HEADS_PER_BLOCK, KEYS_PER_STEP = 64, 128
"""Query heads of a block, and listed keys of a step (csrc/token_sparse_attention/latent.cuh)."""
MAX_SPLITS = 8
"""The largest cluster, in blocks, that every chip with clusters supports: a cluster merges the splits of a list."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LatentSplits:
    """The configuration of the kernel.

    Attributes:
        splits: Number of blocks, a cluster, that a query's list is split over.
    """

    splits: int


PUBLIC_FIELDS: dict[str, str] = {}
"""No field of the public configuration is one of this kernel's."""


def heuristic(record: TokenSparseAttention, device: DeviceInfo, direction: Direction) -> LatentSplits:
    """Returns as many splits as fill the chip, if queries are few."""
    blocks = math.prod(record.query.shape[:2]) * cdiv(record.query.shape[2], HEADS_PER_BLOCK)
    splits = gpu_of(device).multiprocessors // max(1, blocks)
    return LatentSplits(splits=max(1, min(splits, max_splits(record))))


def candidates(record: TokenSparseAttention, device: DeviceInfo, direction: Direction) -> tuple[LatentSplits, ...]:
    """Returns the heuristic's splits, and powers of two up to the largest number."""
    powers = (LatentSplits(splits=1 << n) for n in range(max_splits(record).bit_length()))
    return tuple(dict.fromkeys((heuristic(record, device, direction), *powers)))


def max_splits(record: TokenSparseAttention) -> int:
    """Returns the largest number of splits of which each has a step."""
    return max(1, min(MAX_SPLITS, cdiv(record.indices.shape[3], KEYS_PER_STEP)))
