"""Tile sizes: the heuristic, and the candidates that are worth measuring."""

from typing import Any

from ejkernel.families.token_sparse_attention import TokenSparseAttention
from ejkernel.ops.params import Direction
from ejkernel_xla.query_tiles import MAX_NUMBERS_PER_STEP, PUBLIC_FIELDS, QueryTile, batch_invariant, fit_queries

__all__ = ["PUBLIC_FIELDS", "QueryTile", "batch_invariant", "candidates", "heuristic"]


def heuristic(record: TokenSparseAttention, device: Any, direction: Direction) -> QueryTile:
    """Returns tile sizes for a record on a device, not measured."""
    return fit_queries(*_numbers(record))


def candidates(record: TokenSparseAttention, device: Any, direction: Direction) -> tuple[QueryTile, ...]:
    """Returns tile sizes worth measuring for a record on a device."""
    sizes = (MAX_NUMBERS_PER_STEP * n // 4 for n in (1, 4, 16))
    return tuple(dict.fromkeys(fit_queries(*_numbers(record), numbers) for numbers in sizes))


def _numbers(record: TokenSparseAttention) -> tuple[int, int]:
    """Returns the queries, and the numbers of each in a temporary array: its scores, or the keys that it lists."""
    (_, tokens, heads, channels), kv_heads = record.query.shape, record.key.shape[2]
    return tokens, record.indices.shape[3] * max(heads // kv_heads, channels, record.value_size)
