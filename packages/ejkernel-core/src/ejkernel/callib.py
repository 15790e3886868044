"""Small things around compiled calls that model code imports from here."""

import functools
from collections.abc import Callable
from typing import Any

import jax

from ejkernel.utils import cdiv, next_power_of_2, strides_from_shape

__all__ = ["cdiv", "ejit", "next_power_of_2", "strides_from_shape"]


def ejit(function: Callable[..., Any] | None = None, /, **options: Any) -> Any:
    """`jax.jit`, usable with and without arguments.

    Compiled programs are kept where JAX keeps them: set `jax_compilation_cache_dir` to have them on disk.

    Args:
        function: What to compile; without it, a decorator is returned.
        **options: Those of `jax.jit`. None means that an option was not given.

    Example:
        ```python
        import jax.numpy as jnp
        from ejkernel.callib import ejit

        @ejit(static_argnames=("power",))
        def raised(x, power):
            return x**power

        assert raised(jnp.arange(3), power=2).tolist() == [0, 1, 4]
        ```
    """
    given = {name: option for name, option in options.items() if option is not None}
    if function is None:
        return functools.partial(ejit, **given)
    return jax.jit(function, **given)
