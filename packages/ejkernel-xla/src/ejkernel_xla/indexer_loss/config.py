"""Tile sizes: the heuristic, and the candidates that are worth measuring."""

from typing import Any

from ejkernel.families.indexer_loss import IndexerLoss
from ejkernel.ops.params import Direction
from ejkernel_xla.query_tiles import MAX_NUMBERS_PER_STEP, PUBLIC_FIELDS, QueryTile, batch_invariant, fit_queries

__all__ = ["PUBLIC_FIELDS", "QueryTile", "batch_invariant", "candidates", "heuristic"]


def heuristic(record: IndexerLoss, device: Any, direction: Direction) -> QueryTile:
    """Returns tile sizes for a record on a device, not measured."""
    return fit_queries(*_queries_and_numbers_per_query(record))


def candidates(record: IndexerLoss, device: Any, direction: Direction) -> tuple[QueryTile, ...]:
    """Returns tile sizes worth measuring for a record on a device."""
    sizes = (1, 4, 16) if direction == "forward" else (4,)  # the backward pass has no tiles
    return tuple(
        dict.fromkeys(
            fit_queries(*_queries_and_numbers_per_query(record), MAX_NUMBERS_PER_STEP * n // 4) for n in sizes
        )
    )


def _queries_and_numbers_per_query(record: IndexerLoss) -> tuple[int, int]:
    """Returns the queries, and the numbers of each in a temporary array: its scores, or the keys that it lists."""
    (_, tokens, heads, channels), kv_heads = record.query.shape, record.key.shape[2]
    return tokens, record.indices.shape[2] * max(heads // kv_heads, channels)
