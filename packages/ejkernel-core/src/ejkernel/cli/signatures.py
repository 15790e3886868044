"""Reads from an operation's public signature which of its arguments are arrays, and which can be literals."""

import inspect
import typing
from typing import Any

from jaxtyping import AbstractArray

from ejkernel.ops.model import CALL_OPTIONS, Op
from ejkernel.types.arguments import optional_fields


def required_arrays(op: Op) -> list[str]:
    """Returns the required array arguments of an operation, in public order."""
    optional = optional_fields(op.arguments)
    return [name for name in accepted_array_dtypes(op) if name not in optional]


def accepted_array_dtypes(op: Op) -> dict[str, frozenset[str]]:
    """Returns the array arguments of an operation, with the names of the dtypes that they may have."""
    dtypes_by_name: dict[str, frozenset[str]] = {}
    for name, parameter in _signature_parameters(op).items():
        dtypes = [d for array in _union_members(parameter) if _is_array(array) for d in array.dtypes]
        if dtypes:
            dtypes_by_name[name] = frozenset(dtypes)
    return dtypes_by_name


def literal_arguments(op: Op) -> list[str]:
    """Returns the arguments of an operation that can be a literal: those that need not be an array."""
    values = {
        name: [m for m in _union_members(p) if m is not type(None)] for name, p in _signature_parameters(op).items()
    }
    plain = (bool, int, float, str, Any)
    return [
        name
        for name, members in values.items()
        if any(m in plain or typing.get_origin(m) in (tuple, typing.Literal) for m in members)
    ]


def _signature_parameters(op: Op) -> dict[str, inspect.Parameter]:
    return {name: p for name, p in op.signature.parameters.items() if name not in CALL_OPTIONS}


def _union_members(parameter: inspect.Parameter) -> tuple[Any, ...]:
    annotation = parameter.annotation
    return (annotation,) if _is_array(annotation) else typing.get_args(annotation) or (annotation,)


def _is_array(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, AbstractArray)
