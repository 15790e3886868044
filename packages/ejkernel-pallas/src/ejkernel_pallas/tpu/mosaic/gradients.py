"""Functions with custom gradient rules that type checkers understand: `jax.custom_vjp` hides their return types."""

from collections.abc import Callable
from typing import Any, TypeVar, cast

import jax

F = TypeVar("F", bound=Callable[..., Any])


def with_custom_gradient(
    forward_with_residuals: Callable[..., Any], gradient_rule: Callable[..., Any], static_argnums: tuple[int, ...] = ()
) -> Any:
    """Returns a decorator that gives a function the gradient rule `gradient_rule`, with the residuals of
    `forward_with_residuals`.

    Args:
        forward_with_residuals: Maps the function's arguments to its value and the residuals of `gradient_rule`.
        gradient_rule: Maps the static arguments, the residuals and the cotangent to the gradients of the other
            arguments.
        static_argnums: Positions of the arguments that are not arrays.
    """

    def apply_gradient_rule(function: F) -> F:
        rule = jax.custom_vjp(function, nondiff_argnums=static_argnums)
        rule.defvjp(forward_with_residuals, gradient_rule)
        return cast(F, rule)

    return apply_gradient_rule
