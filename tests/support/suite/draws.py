"""Random numbers for tests, drawn by programs that all shapes share.

JAX compiles a program for each shape that `jax.random` draws, which took an eighth of the conformance suite's time. An
element depends on the key and on its own index alone (`jax_threefry_partitionable`), so a longer draw begins with the
elements of a shorter one: what is drawn here has a power of two of elements, and the numbers are JAX's bit by bit.
"""

import functools
import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from ejkernel._compat import under_trace
from suite.arrays import to_donatable_jax_array

DRAWING_FUNCTIONS = ("normal", "uniform", "randint")
"""The functions of `jax.random` that tests and cases draw with."""

MAX_SHARED_ELEMENTS = 2**20
"""Longer draws are left to JAX: there, drawing takes longer than compiling."""


def install() -> None:
    """Replaces `DRAWING_FUNCTIONS` in this process; does nothing when called again."""
    for name in DRAWING_FUNCTIONS:
        function = getattr(jax.random, name)
        if function.__module__ != __name__:
            setattr(jax.random, name, share_programs_among_shapes(function))


def share_programs_among_shapes(draw: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """Returns a function that draws the numbers of `draw` with a program per power of two.

    Args:
        draw: A function of `jax.random` with an argument `shape`.
    """
    signature = inspect.signature(draw)

    @functools.wraps(draw)
    def draw_by_shared_program(*args: Any, **kwargs: Any) -> jax.Array:
        call = signature.bind(*args, **kwargs)
        shape = call.arguments.get("shape", ())
        if not _can_share_program(call.arguments, shape):
            return draw(*args, **kwargs)
        size = math.prod(shape)
        call.arguments["shape"] = (max(8, 1 << (size - 1).bit_length()),)
        # `jnp.array` would compile a program per shape.
        return to_donatable_jax_array(np.asarray(draw(*call.args, **call.kwargs))[:size].reshape(shape))

    draw_by_shared_program.__module__ = __name__
    return draw_by_shared_program


def _can_share_program(arguments: Mapping[str, Any], shape: Any) -> bool:
    """Returns whether a call draws an array of known shape on the default device, and is not being traced."""
    key = arguments["key"]
    return (
        not under_trace()
        and isinstance(key, jax.Array)
        and not key.committed
        and isinstance(shape, tuple | list)
        and all(isinstance(length, int) for length in shape)
        and 0 < math.prod(shape) <= MAX_SHARED_ELEMENTS
        and arguments.get("out_sharding") is None
        and all(isinstance(arguments.get(limit, 0), int | float) for limit in ("minval", "maxval"))
        and jax.sharding.get_abstract_mesh().empty
    )
