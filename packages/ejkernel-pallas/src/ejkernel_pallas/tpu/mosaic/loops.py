"""Loops whose body is compiled once."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax


def fori_loop(first_index: Any, end_index: Any, body: Callable[[Any, Any], Any], carry: Any) -> Any:
    """Like `lax.fori_loop`, with traced bounds.

    Mosaic emits a `fori_loop` with traced bounds twice, the second time for the remainder of an unrolled loop. A nest
    of such loops emits its innermost body many times, and takes as long to compile. It does not recognise this loop,
    whose bound is not carried, as a `fori_loop`.
    """
    end_index = jnp.int32(end_index)
    state = lax.while_loop(lambda x: x[0] < end_index, lambda x: (x[0] + 1, body(*x)), (jnp.int32(first_index), carry))
    return state[1]


def for_each_index(num_iterations: int, body: Callable[[Any], None]) -> None:
    """Calls `body` with 0 to `num_iterations - 1` in a loop, so that its code is emitted once.

    `num_iterations` is a Python int; `fori_loop` takes traced bounds.
    """
    if num_iterations == 1:
        body(0)
        return

    def call_body(k: Any, carry: Any) -> Any:
        body(k)
        return carry

    lax.fori_loop(np.int32(0), np.int32(num_iterations), call_body, np.int32(0))
