"""Names that arguments had earlier, and are still known by."""

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

Function = TypeVar("Function", bound=Callable[..., Any])


def also_called(**names: str) -> Callable[[Function], Function]:
    """Lets keyword arguments of a function be given by older names.

    Args:
        **names: Older name -> name.
    """

    def known(function: Function) -> Function:
        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            for old in names.keys() & kwargs.keys():
                if names[old] in kwargs:
                    raise TypeError(f"{function.__name__}() got {old!r} and {names[old]!r}, two names of one argument")
                kwargs[names[old]] = kwargs.pop(old)
            return function(*args, **kwargs)

        run.__dict__["also_called"] = names
        return cast(Function, run)

    return known
