"""A toy implementation, as a third party would write it, whose forward pass leaves more than the family's residuals.

It takes the arithmetic and the notes of what ran from `toy`.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
import toy

from ejkernel.arithmetic import cdiv
from ejkernel.types.pullback import is_differentiated

PRIVATE: list[Any] = []
"""The private residuals that every backward trace got."""

DIFFERENTIATED: list[bool] = []
"""Whether a backward pass follows, as every forward trace is told."""


class Sums(NamedTuple):
    """What only this kernel's backward reads: the derivative of `x ** power`, and chunk sums of as many rows as fit."""

    slope: Any
    chunks: Any


class Late(NamedTuple):
    """The same fields after two others."""

    first: Any
    second: Any
    slope: Any
    chunks: Any


def forward(record: Any, config: Any) -> tuple[Any, Any, Sums]:
    """Leaves private residuals whose shapes depend on the configuration."""
    DIFFERENTIATED.append(is_differentiated())
    output, residuals = toy.forward("private", record, config)
    rows = config.q_blocksize
    chunks = jnp.pad(record.x, ((0, -len(record.x) % rows), (0, 0))).reshape(-1, rows, record.x.shape[1]).sum(1)
    return output, residuals, Sums(record.scale * record.power * record.x ** (record.power - 1), chunks)


def forward_late(record: Any, config: Any) -> tuple[Any, Any, Any]:
    """Leaves the same private residuals after two more arrays."""
    output, residuals, sums = forward(record, config)
    return output, residuals, Late(jnp.zeros(3), jnp.zeros(4), *sums)


def backward(pullback: Any, config: Any) -> dict[str, Any]:
    """Cannot do without the private residuals, nor with another chunk size than the forward pass had."""
    private = pullback.private_residuals
    PRIVATE.append(private)
    assert len(private.chunks) == cdiv(len(pullback.record.x), config.q_blocksize)
    toy.SEEN.append(("private", "backward", config))
    return {"x": pullback.cotangent * private.slope, "bias": pullback.cotangent}


def heuristic(record: Any, device: Any, direction: str) -> Any:
    """Says for which direction it was asked."""
    return toy.heuristic(record, device, "forward" if direction == "both" else direction)


def candidates(record: Any, device: Any, direction: str) -> Any:
    """For a pair, of both passes at once."""
    return toy.candidates((2, 3))(record, device, "forward" if direction == "both" else direction)


SPACE = toy.space(heuristic, candidates)


def implementation(name: str = "private", **fields: Any) -> Any:
    """Returns an implementation that leaves private residuals, and is paired."""
    own = {"forward": "private_residuals:forward", "backward": "private_residuals:backward", "config": SPACE}
    return toy.implementation(name, **own | {"paired": True} | fields)
