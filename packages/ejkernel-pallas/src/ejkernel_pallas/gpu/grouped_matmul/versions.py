"""Versions of a kernel's code, of which one serves a tile."""

import functools
from collections.abc import Callable, Iterable
from typing import Any

import jax.experimental.pallas as pl
import jax.numpy as jnp


def run_first(versions: Iterable[tuple[Any, Callable[[], None]]]) -> None:
    """Runs the first version whose condition holds; that of the last is None, and it runs where none before it does."""
    rest: list[Any] = []
    for holds, run in versions:
        conditions = rest if holds is None else [*rest, holds]
        if conditions:
            pl.when(functools.reduce(jnp.logical_and, conditions))(run)
        else:
            run()
        if holds is not None:
            rest.append(~holds)
