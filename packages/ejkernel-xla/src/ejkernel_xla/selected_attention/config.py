"""Tile sizes: the heuristic, and the candidates that are worth measuring."""

import dataclasses
from typing import Any

from ejkernel.arithmetic import known_or
from ejkernel.families.selected_attention import SelectedAttention, blocks_per_query, num_listable_blocks
from ejkernel.ops.params import Direction
from ejkernel_xla.sizes import check_positive

ROWS_PER_BLOCK = 512
"""Query rows that read a block at once, all query heads of a KV head counted: a long matrix product whose operands
still fit into a cache."""
MAX_BLOCK_Q = 256
"""Most queries per tile: longer ones fill up with nothing after the last query of a block."""

ASSUMED_QUERIES, ASSUMED_BLOCKS = 256, 2**16
"""Queries whose lists are sorted together, and blocks, if their counts are symbolic."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SelectedTiles:
    """The configuration of either pass.

    Attributes:
        queries_per_sort: Queries whose lists of blocks are sorted together.
        block_q: Queries that read one block of keys at once.
    """

    queries_per_sort: int
    block_q: int

    def __post_init__(self) -> None:
        check_positive(self)


PUBLIC_FIELDS = {"block_q": "block_q"}
"""Public configuration field -> field of this."""


def sizes(record: SelectedAttention, config: SelectedTiles) -> tuple[int, int]:
    """Returns queries whose lists are sorted together, and queries per tile, no more than there can be."""
    queries = min(config.queries_per_sort, _max_sorted_queries(record))
    return queries, min(config.block_q, queries)


def heuristic(record: SelectedAttention, device: Any, direction: Direction) -> SelectedTiles:
    """Returns tile sizes for a record on a device, not measured."""
    group = record.query.shape[2] // record.key.shape[2]
    return _with_default_sizes(record, min(MAX_BLOCK_Q, max(16, ROWS_PER_BLOCK // group)))


def candidates(record: SelectedAttention, device: Any, direction: Direction) -> tuple[SelectedTiles, ...]:
    """Returns tile sizes worth measuring for a record on a device."""
    return tuple(dict.fromkeys(_with_default_sizes(record, rows) for rows in (64, 128, 256, 512, 1024)))


def _with_default_sizes(record: SelectedAttention, rows: int) -> SelectedTiles:
    queries = _max_sorted_queries(record)
    return SelectedTiles(queries_per_sort=queries, block_q=min(queries, rows))


def _max_sorted_queries(record: SelectedAttention) -> int:
    """Returns the most queries whose pairs of block and slot can be numbered in 32 bits, for the sort."""
    pairs = (known_or(num_listable_blocks(record), ASSUMED_BLOCKS) + 1) * max(1, blocks_per_query(record))
    return max(1, min(known_or(record.query.shape[1], ASSUMED_QUERIES), 2**31 // pairs))
