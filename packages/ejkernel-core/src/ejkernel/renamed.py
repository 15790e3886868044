"""Names that arguments had earlier, and are still known by."""

import functools
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast

Function = TypeVar("Function", bound=Callable[..., Any])


def accept_older_names(**names: str) -> Callable[[Function], Function]:
    """Lets keyword arguments of a function be given by older names.

    Args:
        **names: Older name -> name.
    """

    def with_older_names(function: Function) -> Function:
        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            return function(*args, **current_names(run, kwargs))

        run.__dict__["also_called"] = names
        return cast(Function, run)

    return with_older_names


def current_names(function: Callable[..., Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Returns keyword arguments of a function by the names in its signature.

    Raises:
        TypeError: An argument has two values, one by each of its names.
    """
    names: Mapping[str, str] = getattr(function, "also_called", {})
    for old in names.keys() & kwargs.keys():
        if names[old] in kwargs:
            function_name = getattr(function, "__name__", "a function")
            raise TypeError(f"{function_name}() got {old!r} and {names[old]!r}, two names of one argument")
    return {names.get(name, name): value for name, value in kwargs.items()}
