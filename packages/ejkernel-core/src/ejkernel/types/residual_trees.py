"""Residuals of `jax.custom_vjp` whose tree depends on what is differentiated."""

import threading
from typing import Any

import jax
import jax.numpy as jnp

PADDED_TO = 64


class ResidualTrees:
    """The trees of the residuals of one call.

    `jax.custom_vjp` traces the forward pass once for every set of differentiated arguments, but pairs the arrays of
    each trace with the tree of the last one. Here the arrays are a list of the same length in most traces, whose first
    array has the number of their tree in its shape.

    Args:
        padded_to: The length of the list, without its first array, is a multiple of this.
    """

    def __init__(self, padded_to: int = PADDED_TO) -> None:
        self._padded_to = padded_to
        self._numbers: dict[Any, int] = {}
        self._trees: list[Any] = []
        self._lock = threading.Lock()  # several threads may trace the call

    def pack(self, residuals: Any) -> list[jax.Array]:
        """Returns the arrays of a tree, after one that numbers the tree and before padding without entries."""
        arrays, tree = jax.tree.flatten(residuals)
        padding = [jnp.zeros((0,), bool)] * (-len(arrays) % self._padded_to)
        return [jnp.zeros((0, 1 + self._number_of(tree)), bool), *arrays, *padding]

    def unpack(self, packed: list[jax.Array]) -> Any:
        """Returns the tree that `pack` was given."""
        tree = self._trees[packed[0].shape[1] - 1]
        return jax.tree.unflatten(tree, packed[1 : 1 + tree.num_leaves])

    def _number_of(self, tree: Any) -> int:
        with self._lock:
            number = self._numbers.get(tree) if _is_hashable(tree) else None
            if number is None:
                number = len(self._trees)
                self._trees.append(tree)
                if _is_hashable(tree):
                    self._numbers[tree] = number
            return number


def _is_hashable(tree: Any) -> bool:
    try:
        hash(tree)
    except TypeError:  # a caller's node may hold any value
        return False
    return True
