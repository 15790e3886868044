"""Runs exactly one of several branches of a kernel's code for a tile."""

import functools
from collections.abc import Callable
from typing import Any

import jax.experimental.pallas as pl
import jax.numpy as jnp


class FirstMatchingBranch:
    """Runs the first of several branches whose condition holds.

    N of a product is a compile-time constant, so a tile has several branches; they are uniform in a warpgroup.
    """

    def __init__(self) -> None:
        self._none_before: list[Any] = []

    def when(self, condition: Any, run: Callable[[], None]) -> None:
        """Runs `run` if the condition holds, and none before it did."""
        pl.when(functools.reduce(jnp.logical_and, [*self._none_before, condition]))(run)
        self._none_before.append(~condition)

    def otherwise(self, run: Callable[[], None]) -> None:
        """Runs `run` if no condition holds."""
        if self._none_before:
            pl.when(functools.reduce(jnp.logical_and, self._none_before))(run)
        else:
            run()
