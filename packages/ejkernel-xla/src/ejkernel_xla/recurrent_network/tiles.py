"""How many tokens a turn of the loop takes: when nobody chose, and what is worth measuring."""

from typing import Any

from ejkernel.families.recurrent_network import RecurrentNetwork
from ejkernel.ops import ConfigSpace
from ejkernel.ops.config.params import BaseOperationConfig, Direction

UNROLLED = (1, 4)


def space(config: type[BaseOperationConfig]) -> ConfigSpace:
    """The configurations of an operation."""

    def heuristic(record: RecurrentNetwork, device: Any, direction: Direction) -> BaseOperationConfig:
        return config(**{"unroll": UNROLLED[0]})

    def candidates(record: RecurrentNetwork, device: Any, direction: Direction) -> tuple[BaseOperationConfig, ...]:
        return tuple(config(**{"unroll": tokens}) for tokens in UNROLLED)

    return ConfigSpace(reads=frozenset({"unroll"}), heuristic=heuristic, candidates=candidates)
