"""Rows of the weights a step: the heuristic, and the candidates that are worth measuring."""

import dataclasses
from typing import Any

from ejkernel.arithmetic import at_most, known_or
from ejkernel.families.tiled_attention import TiledAttention
from ejkernel.ops.params import Direction
from ejkernel_xla.sizes import ASSUMED_KEYS, check_positive
from ejkernel_xla.tiled_attention.plan import SCORES_PER_STEP, TilePlan, make_plan


@dataclasses.dataclass(frozen=True, kw_only=True)
class WeightRows:
    """The configuration of either pass.

    Attributes:
        block_q: Queries whose weights, of all keys, are computed at once.
    """

    block_q: int

    def __post_init__(self) -> None:
        check_positive(self)


PUBLIC_FIELDS = {"weights_block_q": "block_q"}
"""Public configuration field -> field of this."""


def plan_rows(record: TiledAttention, config: WeightRows) -> TilePlan:
    """Cuts the queries of a record alone: a tile of weights has all keys."""
    return make_plan(record, config.block_q, record.key.shape[1])


def heuristic(record: TiledAttention, device: Any, direction: Direction) -> WeightRows:
    """Returns as many queries as fit a tile. The size is not measured."""
    (_, length, heads, _), (_, keys, kv_heads, _) = record.query.shape, record.key.shape
    max_query_rows = SCORES_PER_STEP * kv_heads // max(1, heads * known_or(keys, ASSUMED_KEYS))
    return WeightRows(block_q=max(1, at_most(max_query_rows, length)))


def candidates(record: TiledAttention, device: Any, direction: Direction) -> tuple[WeightRows, ...]:
    """Returns numbers of queries worth measuring."""
    length = max(1, record.query.shape[1])
    return tuple(WeightRows(block_q=n) for n in sorted({min(n, length) for n in (64, 256, 1024)}))
