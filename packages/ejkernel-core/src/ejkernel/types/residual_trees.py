"""Residuals of `jax.custom_vjp` whose tree depends on what is differentiated."""

import itertools
from typing import Any

import jax
import jax.numpy as jnp

PADDED_TO = 64


class ResidualTrees:
    """The trees of the residuals of one call.

    `jax.custom_vjp` traces the forward pass once for every set of differentiated arguments, but pairs the arrays of
    each trace with the tree of the last one. Here the arrays are a list of the same length in most traces, whose first
    array has the number of their tree in its shape.
    """

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self._trees: dict[int, Any] = {}

    def pack(self, residuals: Any) -> list[jax.Array]:
        """Returns the arrays of a tree, after one that numbers the tree and before padding without entries."""
        arrays, tree = jax.tree.flatten(residuals)
        number = next(self._numbers)  # another for each of several threads
        self._trees[number] = tree
        return [jnp.zeros((0, 1 + number), bool), *arrays, *([jnp.zeros((0,), bool)] * (-len(arrays) % PADDED_TO))]

    def unpack(self, packed: list[jax.Array]) -> Any:
        """Returns the tree that `pack` was given."""
        tree = self._trees[packed[0].shape[1] - 1]
        return jax.tree.unflatten(tree, packed[1 : 1 + tree.num_leaves])
