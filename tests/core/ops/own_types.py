"""A kernel of `toy` with configuration types of its own; as a script, prints what the user's store has for its call."""

import dataclasses
import sys
from typing import Any

import jax.numpy as jnp
import toy

from ejkernel.ops import ConfigSelectorChain, ConfigSpace, PersistentCache


@dataclasses.dataclass(frozen=True, kw_only=True)
class OwnForward:
    block_rows: int
    order: str = "rows"


@dataclasses.dataclass(frozen=True, kw_only=True)
class OwnBackward:
    block_rows: int
    dkv_stages: int


def rule(record: Any, device: Any, direction: str) -> Any:
    return OwnBackward(block_rows=8, dkv_stages=2) if direction == "backward" else OwnForward(block_rows=8)


def candidates(record: Any, device: Any, direction: str) -> tuple[Any, ...]:
    return (dataclasses.replace(rule(record, device, direction), block_rows=4),)


SPACE = ConfigSpace(
    heuristic=rule,
    candidates=candidates,
    forward=OwnForward,
    backward=OwnBackward,
    public_fields={"q_blocksize": "block_rows", "num_stages": "dkv_stages"},
)


def plugin() -> Any:
    return toy.plugin(toy.implementation("own", config=SPACE))


def main(path: str) -> None:
    from ejkernel.ops import plugins

    plugins._entry_points = lambda: [plugin()]
    plugins.reload()
    chain = ConfigSelectorChain(persistent=PersistentCache(path))
    for direction in ("forward", "backward"):
        selection = chain.choose(toy.request(chain, jnp.ones((4, 8)), direction))
        print(selection.tier, selection.part)


if __name__ == "__main__":
    main(sys.argv[1])
