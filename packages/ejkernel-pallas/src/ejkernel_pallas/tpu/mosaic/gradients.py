"""Functions with custom gradient rules that type checkers understand: `jax.custom_vjp` hides their return types."""

from collections.abc import Callable
from typing import Any, TypeVar, cast

import jax

F = TypeVar("F", bound=Callable[..., Any])


def with_custom_gradient(
    forward_with_residuals: Callable[..., Any], gradients: Callable[..., Any], static: tuple[int, ...] = ()
) -> Any:
    """Returns a decorator that gives a function the gradient rule `gradients`, with the residuals of
    `forward_with_residuals`.

    Args:
        forward_with_residuals: Maps the function's arguments to its value and the residuals of `gradients`.
        gradients: Maps the static arguments, the residuals and the cotangent to the gradients of the other arguments.
        static: Positions of the arguments that are not arrays.
    """

    def decorate(function: F) -> F:
        rule = jax.custom_vjp(function, nondiff_argnums=static)
        rule.defvjp(forward_with_residuals, gradients)
        return cast(F, rule)

    return decorate
