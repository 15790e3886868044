"""Rows of the weights a step: how many when nobody chose, and which numbers are worth measuring."""

from typing import Any

from ejkernel.families.tiled_attention import TiledAttention
from ejkernel.modules.operations.configuration.attention import AttentionConfig
from ejkernel.ops.config.params import Direction
from ejkernel_xla.tiled_attention.blocks import TILE_ELEMENTS, Plan, make_plan


def plan_rows(record: TiledAttention, config: AttentionConfig) -> Plan:
    """Cuts the queries of a record alone: a tile of weights has all keys."""
    queries = config.weights_block_q or record.query.shape[1]
    return make_plan(record, queries, record.key.shape[1])


def heuristic(record: TiledAttention, device: Any, direction: Direction) -> AttentionConfig:
    """As many queries as fit a tile, not measured."""
    (_, length, heads, _), (_, keys, kv_heads, _) = record.query.shape, record.key.shape
    room = TILE_ELEMENTS * kv_heads // max(1, heads * keys)
    return AttentionConfig(weights_block_q=max(1, min(length, room)))


def candidates(record: TiledAttention, device: Any, direction: Direction) -> tuple[AttentionConfig, ...]:
    """Numbers of queries worth measuring."""
    length = max(1, record.query.shape[1])
    return tuple(AttentionConfig(weights_block_q=n) for n in sorted({min(n, length) for n in (64, 256, 1024)}))
