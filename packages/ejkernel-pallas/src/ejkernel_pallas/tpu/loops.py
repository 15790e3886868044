"""Loops that are laid out once."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax


def loop(first: Any, end: Any, step: Callable[[Any, Any], Any], carry: Any) -> Any:
    """`lax.fori_loop`, for bounds that are traced.

    Mosaic lays a `fori_loop` with such bounds out twice, the second time for trips that unrolling would leave over. In
    a nest of loops the innermost body then is there many times, and takes as long to compile. It does not know this
    loop for one, as its bound is not among what is carried.
    """
    end = jnp.int32(end)
    state = lax.while_loop(lambda x: x[0] < end, lambda x: (x[0] + 1, step(*x)), (jnp.int32(first), carry))
    return state[1]


def each(count: int, act: Callable[[Any], None]) -> None:
    """Calls `act` with 0 to `count - 1`, laid out once."""
    if count == 1:
        act(0)
        return

    def step(k: Any, carry: Any) -> Any:
        act(k)
        return carry

    lax.fori_loop(np.int32(0), np.int32(count), step, np.int32(0))
