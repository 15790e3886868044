"""Tile sizes: which are used when nobody chose, and which are worth measuring."""

from typing import Any

from ejkernel.families.selected_attention import SelectedAttention, blocks, slots
from ejkernel.modules.operations.configs import NativeSparseAttentionConfig
from ejkernel.ops.config.params import Direction

ROWS = 512
"""Query rows that read a block at once, all query heads of a KV head counted: a long matrix product whose operands
still fit into a cache."""
QUERIES = 256
"""Most queries a tile: longer ones fill up with nothing behind the last query of a block."""


def sizes(record: SelectedAttention, config: NativeSparseAttentionConfig) -> tuple[int, int]:
    """Queries whose lists are sorted together, and queries a tile."""
    rule = heuristic(record, None, "forward")
    queries = min(config.block_q or record.query.shape[1], _most(record))
    return queries, min(config.block_k or rule.block_k or 1, queries)


def heuristic(record: SelectedAttention, device: Any, direction: Direction) -> NativeSparseAttentionConfig:
    """Tile sizes for a record on a device, not measured."""
    group = record.query.shape[2] // record.key.shape[2]
    queries = _most(record)
    return NativeSparseAttentionConfig(block_q=queries, block_k=min(queries, QUERIES, max(16, ROWS // group)))


def candidates(record: SelectedAttention, device: Any, direction: Direction) -> tuple[NativeSparseAttentionConfig, ...]:
    """Tile sizes worth measuring for a record on a device."""
    queries = _most(record)
    made = (
        NativeSparseAttentionConfig(block_q=queries, block_k=min(queries, rows)) for rows in (64, 128, 256, 512, 1024)
    )
    return tuple(dict.fromkeys(made))


def _most(record: SelectedAttention) -> int:
    """The most queries whose pairs of block and slot can be numbered in 32 bits, for the sort."""
    pairs = (blocks(record) + 1) * max(1, slots(record))
    return max(1, min(record.query.shape[1], 2**31 // pairs))
