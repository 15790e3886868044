"""Tile sizes: the heuristic, and the candidates that are worth measuring."""

import dataclasses
from typing import Any

from ejkernel.arithmetic import at_most
from ejkernel.families.dense_indexer_loss import DenseIndexerLoss
from ejkernel.ops.params import Direction
from ejkernel_xla.query_tiles import MAX_NUMBERS_PER_STEP
from ejkernel_xla.sizes import check_positive

BLOCK_K = 512
"""Keys per tile, unless there are fewer."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LossTiles:
    """The configuration of either pass.

    Attributes:
        block_q: Queries per tile.
        block_k: Keys per tile.
    """

    block_q: int
    block_k: int

    def __post_init__(self) -> None:
        check_positive(self)


PUBLIC_FIELDS = {"block_q": "block_q", "block_k": "block_k"}
"""Public configuration field -> field of this."""


def sizes(record: DenseIndexerLoss, config: LossTiles) -> tuple[int, int]:
    """Returns queries and keys per tile, no more than there are."""
    return at_most(config.block_q, record.query.shape[1]), at_most(config.block_k, record.key.shape[1])


def heuristic(record: DenseIndexerLoss, device: Any, direction: Direction) -> LossTiles:
    """Returns tile sizes for a record on a device, not measured."""
    return _largest_tiles_that_fit(record, BLOCK_K, MAX_NUMBERS_PER_STEP)


def candidates(record: DenseIndexerLoss, device: Any, direction: Direction) -> tuple[LossTiles, ...]:
    """Returns tile sizes worth measuring for a record on a device."""
    pairs = ((keys, MAX_NUMBERS_PER_STEP * n // 4) for keys in (BLOCK_K // 2, 4 * BLOCK_K) for n in (4, 16))
    return tuple(dict.fromkeys(_largest_tiles_that_fit(record, *pair) for pair in pairs))


def _largest_tiles_that_fit(record: DenseIndexerLoss, block_k: int, max_numbers: int) -> LossTiles:
    """Returns tiles of the given keys, with as many queries as the scores of all heads have room for."""
    (_, tokens, heads, _), keys = record.query.shape, record.key.shape[1]
    block_k = max(1, at_most(block_k, keys))
    per_query = max(heads, record.query_index.shape[2]) * block_k
    return LossTiles(block_q=max(1, at_most(max_numbers // per_query, tokens)), block_k=block_k)
