"""Checks the types of what a plugin declares: a wrong one is an error of that plugin, and not of every call."""

from collections.abc import Callable, Mapping
from typing import Any

NAMES = "a frozenset of names"
TEXT = "a str"
TEXTS = "a tuple of str"
FUNCTION = "a function"

_CHECKS: Mapping[str, Callable[[Any], bool]] = {
    NAMES: lambda value: isinstance(value, frozenset) and _are_texts(value),
    TEXT: lambda value: isinstance(value, str) and value != "",
    TEXTS: lambda value: isinstance(value, tuple) and _are_texts(value),
    FUNCTION: callable,
}


def _are_texts(values: Any) -> bool:
    return all(isinstance(value, str) for value in values)


def check_types(declared: Any, described: str, types: Mapping[str, Any]) -> None:
    """Checks fields of a declaration.

    Args:
        declared: The declaration, a dataclass.
        described: What to call it in the message.
        types: Field -> the accepted types: classes, descriptions such as `NAMES`, or None where the field may be None.

    Raises:
        ValueError: A field has another type.
    """
    for field, accepted in types.items():
        value = getattr(declared, field)
        accepted = accepted if isinstance(accepted, tuple) else (accepted,)
        if not any(_has_type(value, kind) for kind in accepted):
            expected = " or ".join(getattr(kind, "__name__", str(kind)) for kind in accepted)
            raise ValueError(f"{field} of {described}: got {value!r}, wants {expected}")


def _has_type(value: Any, kind: Any) -> bool:
    if kind is None:
        return value is None
    if isinstance(kind, str):
        return _CHECKS[kind](value)
    return isinstance(value, kind) and not isinstance(value, bool)
