"""Zeros in the place of random numbers, where a case is traced for the shapes of its arrays alone."""

import contextlib
import functools
import inspect
from collections.abc import Callable, Generator
from typing import Any

import jax
import jax.numpy as jnp

DTYPES = {"normal": float, "uniform": float, "randint": int, "bernoulli": bool}
"""The functions of `jax.random` that are replaced, and the dtypes that they draw by default."""

_draws_are_constant: Any = jax.make_user_context(False)
"""A part of the key of JAX's caches: no program that was traced with zeros is run with random numbers."""


@contextlib.contextmanager
def constant_draws() -> Generator[None]:
    """Makes `jax.random` return zeros of the same shape and dtype until the block ends: they are traced faster.

    It is for one thread: others that draw in this time get zeros, too. Compiled functions are traced again after it.
    """
    originals = {name: getattr(jax.random, name) for name in DTYPES}
    for name, draw in originals.items():
        setattr(jax.random, name, _zeros(draw, DTYPES[name]))
    try:
        with _draws_are_constant(True):
            yield
    finally:
        for name, draw in originals.items():
            setattr(jax.random, name, draw)


def _zeros(draw: Callable[..., jax.Array], default: type) -> Callable[..., jax.Array]:
    signature = inspect.signature(draw)

    @functools.wraps(draw)
    def zeros(*args: Any, **kwargs: Any) -> jax.Array:
        arguments = signature.bind(*args, **kwargs).arguments
        shape, dtype = arguments.get("shape"), arguments.get("dtype")
        if shape is None:  # `bernoulli` then draws a number for each probability
            shape = jnp.shape(arguments["p"]) if "p" in arguments else ()
        return jnp.zeros(shape, default if dtype is None else dtype)

    return zeros
