"""Tile sizes: the heuristic, and the candidates that are worth measuring."""

import dataclasses
from typing import Any

from ejkernel.families.indexer_loss import IndexerLoss
from ejkernel.ops.params import Direction
from ejkernel_xla.sizes import check_positive

NUMBERS_PER_STEP = 2**20
"""Numbers of the largest temporary array: 4 MiB of float32."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class QueryTile:
    """The configuration of the forward pass; the backward pass has no tiles.

    Attributes:
        block_q: Queries per tile.
    """

    block_q: int

    def __post_init__(self) -> None:
        check_positive(self)


PUBLIC_FIELDS = {"block_q": "block_q"}
"""Public configuration field -> field of this."""


def heuristic(record: IndexerLoss, device: Any, direction: Direction) -> QueryTile:
    """Returns tile sizes for a record on a device, not measured."""
    return _sized(record, NUMBERS_PER_STEP)


def candidates(record: IndexerLoss, device: Any, direction: Direction) -> tuple[QueryTile, ...]:
    """Returns tile sizes worth measuring for a record on a device."""
    sizes = (1, 4, 16) if direction == "forward" else (4,)
    return tuple(dict.fromkeys(_sized(record, NUMBERS_PER_STEP * n // 4) for n in sizes))


def _sized(record: IndexerLoss, numbers: int) -> QueryTile:
    """Returns as many queries as fit: their scores, or the keys that they list."""
    (_, tokens, heads, channels), kv_heads = record.query.shape, record.key.shape[2]
    per_query = record.indices.shape[2] * max(heads // kv_heads, channels)
    return QueryTile(block_q=max(1, min(tokens, numbers // max(1, per_query))))
