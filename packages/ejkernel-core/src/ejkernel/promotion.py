"""JAX's own rules of promotion for the library's code, whatever a caller has set for theirs."""

import contextlib
import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

import jax

Function = TypeVar("Function", bound=Callable[..., Any])

_NO_CONTEXT: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()


def standard_promotion() -> contextlib.AbstractContextManager[Any]:
    """Returns a context in which arrays of different ranks and dtypes go together as JAX does it by default.

    `jax_numpy_rank_promotion="raise"` and `jax_numpy_dtype_promotion="strict"` are there to find mistakes in a caller's
    code. The settings are part of the jit cache key, and entering them takes longer than reading them.
    """
    config: Any = jax.config
    dtypes = config.jax_numpy_dtype_promotion
    if config.jax_numpy_rank_promotion == "allow" and getattr(dtypes, "value", dtypes) == "standard":
        return _NO_CONTEXT
    return _standard_promotion_context()


@contextlib.contextmanager
def _standard_promotion_context() -> Any:
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        yield


def with_standard_promotion(function: Function) -> Function:
    """Runs a function in `standard_promotion`: a public one, or a rule of `jax.custom_vjp`, which JAX calls later."""

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        with standard_promotion():
            return function(*args, **kwargs)

    return cast(Function, run)
