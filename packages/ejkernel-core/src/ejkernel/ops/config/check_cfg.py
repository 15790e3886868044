"""Checks the values in a public configuration, whether or not the chosen kernel reads them."""

import dataclasses
import functools
import typing
from typing import Any, Literal, get_args, get_origin

from ejkernel.ops.model import Op
from ejkernel.ops.params import BaseOperationConfig, Platform
from ejkernel.ops.plugins import registry


def check_cfg(op: Op, config: Any, argument: str) -> None:
    """Refuses what is not a configuration of an operation, and values that its fields do not have.

    Args:
        op: The operation.
        config: The configuration.
        argument: The argument that it comes from, for the message.

    Raises:
        ValueError: It is of another class, or a field has a value of another type, or a size is not positive.
    """
    if not isinstance(config, op.config):
        raise ValueError(f"{argument}: got {type(config).__name__}, wants {op.config.__name__}")
    for name, hint in _field_types(type(config)).items():
        value, label = getattr(config, name), f"{argument}.{name}"
        if name == "platform":
            check_platform(op, value, label)
        elif (wants := _expected_value(value, hint)) is not None:
            raise ValueError(f"{label}: got {value!r}, wants {wants}")


def check_platform(op: Op, platform: Any, argument: str = "platform") -> None:
    """Refuses a platform that neither the project nor an installed backend has.

    Raises:
        ValueError: The platform is unknown.
    """
    known = (*get_args(Platform), *(i.platform for i in registry().implementations.get(op.name, ())))
    if platform in known:
        return
    # A plugin that did not load may have been meant.
    if not isinstance(platform, str) or not platform or not registry().failed:
        names = ", ".join(map(repr, dict.fromkeys(known)))
        raise ValueError(f"{argument}: got {platform!r}, wants one of {names}")


@functools.cache
def _field_types(config_type: type[BaseOperationConfig]) -> dict[str, Any]:
    hints = typing.get_type_hints(config_type)
    return {field.name: hints[field.name] for field in dataclasses.fields(config_type)}


def _expected_value(value: Any, hint: Any) -> str | None:
    """Returns what the value of a field of the type `hint` should be; None if `value` is one."""
    choices = get_args(hint) if get_origin(hint) is not Literal else (hint,)
    alternatives = [_expected_by_type(value, choice) for choice in choices or (hint,) if choice is not type(None)]
    if (value is None and type(None) in choices) or None in alternatives:
        return None
    return " or ".join([*filter(None, alternatives), *(["None"] if type(None) in choices else [])])


def _expected_by_type(value: Any, hint: Any) -> str | None:
    if get_origin(hint) is Literal:
        allowed = get_args(hint)
        is_allowed = isinstance(value, str) and value in allowed
        return None if is_allowed else f"one of {', '.join(map(repr, allowed))}"
    if get_origin(hint) is tuple:
        return None if isinstance(value, tuple) and len(value) == len(get_args(hint)) else "a tuple"
    if hint is int:
        is_size = not isinstance(value, bool) and hasattr(value, "__index__") and value >= 1
        return None if is_size else "a positive integer"
    if hint is float:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        return None if is_number else "a number"
    if dataclasses.is_dataclass(hint):  # or the type of a kernel, which refuses the types of others
        is_part = dataclasses.is_dataclass(value) and not isinstance(value, type)
        return None if is_part else f"{getattr(hint, '__name__', hint)}, a kernel's own configuration"
    if not isinstance(hint, type) or get_origin(hint) is not None:  # another backend's own
        return None
    words = {bool: "True or False", str: "text"}
    return None if isinstance(value, hint) else words.get(hint, hint.__name__)


__all__ = ["check_cfg", "check_platform"]
