"""Functions with a gradient rule of their own, as type checkers see them: `jax.custom_vjp` hides what they return."""

from collections.abc import Callable
from typing import Any, TypeVar, cast

import jax

F = TypeVar("F", bound=Callable[..., Any])


def with_gradient(saved: Callable[..., Any], gradients: Callable[..., Any], static: tuple[int, ...] = ()) -> Any:
    """Returns a decorator that gives a function the rule `gradients` of what `saved` keeps.

    Args:
        saved: From the function's arguments to its value and what `gradients` needs.
        gradients: From the static arguments, what was kept and the cotangent to the gradients of the others.
        static: Positions of the arguments that are no arrays.
    """

    def decorate(function: F) -> F:
        rule = jax.custom_vjp(function, nondiff_argnums=static)
        rule.defvjp(saved, gradients)
        return cast(F, rule)

    return decorate
