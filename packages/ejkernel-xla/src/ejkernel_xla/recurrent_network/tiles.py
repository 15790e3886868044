"""Blocks of tokens: which are used when nobody chose, and which are worth measuring."""

from collections.abc import Callable
from typing import Any

from ejkernel.families.recurrent_network import RecurrentNetwork
from ejkernel.ops import ConfigSpace
from ejkernel.ops.config.params import BaseOperationConfig, Direction

ROWS = {"forward": 256, "backward": 512}
"""Tokens of all rows that are multiplied at once on a CPU: enough for the products to be efficient, of which the
backward pass adds some to gradients of weights, and few enough for the results to fit a cache."""


def space(config: Callable[..., BaseOperationConfig]) -> ConfigSpace:
    """The configurations of an operation, of the class given."""

    def heuristic(record: RecurrentNetwork, device: Any, direction: Direction) -> BaseOperationConfig:
        tokens = _in_cache(record, direction) if device.platform == "cpu" else record.x.shape[1]
        return config(block_t=tokens, unroll=1)

    def candidates(record: RecurrentNetwork, device: Any, direction: Direction) -> tuple[BaseOperationConfig, ...]:
        every = record.x.shape[1]
        pairs = dict.fromkeys(((_in_cache(record, direction), 1), (every, 1), (every, 4)))
        return tuple(config(block_t=tokens, unroll=unroll) for tokens, unroll in pairs)

    return ConfigSpace(reads=frozenset({"block_t", "unroll"}), heuristic=heuristic, candidates=candidates)


def _in_cache(record: RecurrentNetwork, direction: Direction) -> int:
    rows, tokens, _ = record.x.shape
    return min(tokens, max(1, ROWS[direction] // max(1, rows)))
