"""Loops whose body is compiled once."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax


def loop(first: Any, end: Any, step: Callable[[Any, Any], Any], carry: Any) -> Any:
    """Like `lax.fori_loop`, with traced bounds.

    Mosaic emits a `fori_loop` with traced bounds twice, the second time for the remainder of an unrolled loop. A nest
    of such loops emits its innermost body many times, and takes as long to compile. It does not recognise this loop,
    whose bound is not carried, as a `fori_loop`.
    """
    end = jnp.int32(end)
    state = lax.while_loop(lambda x: x[0] < end, lambda x: (x[0] + 1, step(*x)), (jnp.int32(first), carry))
    return state[1]


def each(count: int, act: Callable[[Any], None]) -> None:
    """Calls `act` with 0 to `count - 1` in a loop, so that its code is emitted once."""
    if count == 1:
        act(0)
        return

    def step(k: Any, carry: Any) -> Any:
        act(k)
        return carry

    lax.fori_loop(np.int32(0), np.int32(count), step, np.int32(0))
