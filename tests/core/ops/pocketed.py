"""Toy implementations, as a third party would write them, whose forward pass leaves more than the family's residuals.

They take the arithmetic and the notes of what ran from `toy`.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
import toy

from ejkernel.types.pullback import is_differentiated

POCKETS: list[tuple[str, Any]] = []
"""(implementation, pocket) of every backward trace."""

DIFFERENTIATED: list[bool] = []
"""Whether a backward pass follows, as every forward trace is told."""


class Pocket(NamedTuple):
    """What only this kernel's backward reads: the derivative of `x ** power`, and chunk sums of as many rows as fit."""

    slope: Any
    chunks: Any


def forward(record: Any, config: Any) -> tuple[Any, Any, Pocket]:
    """Leaves a pocket whose shapes depend on the configuration."""
    DIFFERENTIATED.append(is_differentiated())
    output, residuals = toy.forward("pocket", record, config)
    rows = config.q_blocksize
    chunks = jnp.pad(record.x, ((0, -len(record.x) % rows), (0, 0))).reshape(-1, rows, record.x.shape[1]).sum(1)
    return output, residuals, Pocket(record.scale * record.power * record.x ** (record.power - 1), chunks)


def backward(pullback: Any, config: Any) -> dict[str, Any]:
    """Takes the slope from the pocket where there is one, else makes it from the record."""
    POCKETS.append(("pocket", pullback.pocket))
    if pullback.pocket is None:
        return toy.backward("pocket", pullback, config)
    toy.SEEN.append(("pocket", "backward", config))
    return {"x": pullback.cotangent * pullback.pocket.slope, "bias": pullback.cotangent}


def pair_backward(pullback: Any, config: Any) -> dict[str, Any]:
    """Cannot do without the pocket, nor with another chunk size than the forward pass had."""
    assert len(pullback.pocket.chunks) == -(-len(pullback.record.x) // config.q_blocksize)
    return backward(pullback, config)


def other_backward(pullback: Any, config: Any) -> dict[str, Any]:
    """Of another implementation, which has a pocket of its own kind."""
    POCKETS.append(("other", pullback.pocket))
    return toy.backward("other", pullback, config)


def heuristic(record: Any, device: Any, direction: str) -> Any:
    """Says for which direction it was asked."""
    return toy.heuristic(record, device, "forward" if direction == "both" else direction)


def candidates(record: Any, device: Any, direction: str) -> Any:
    """For a pair, of both passes at once."""
    return toy.candidates((2, 3))(record, device, "forward" if direction == "both" else direction)


SPACE = toy.space(heuristic, candidates)


def implementation(name: str = "pocket", *, paired: bool = False, **fields: Any) -> Any:
    """One that leaves a pocket; paired, it cannot do without it."""
    function = "pair_backward" if paired else "backward"
    own = {"forward": "pocketed:forward", "backward": f"pocketed:{function}", "config": SPACE, "paired": paired}
    return toy.implementation(name, **own | fields)
