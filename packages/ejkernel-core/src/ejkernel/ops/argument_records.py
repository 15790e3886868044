"""Argument records of operations: their fields are stated once, in the signature of the public function."""

import collections.abc
import dataclasses
import inspect
import typing
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

import jax
from jaxtyping import AbstractArray

from ejkernel.ops.model import CALL_OPTIONS
from ejkernel.types import MaskInfo
from ejkernel.types.arguments import arguments, static
from ejkernel.types.pair_functions import PairFunction

PYTREE_CHILD_TYPES = (jax.Array, AbstractArray, MaskInfo, PairFunction)
"""The types of arguments that are children of the record's pytree: arrays, and containers of arrays."""


class ArgumentRecord:
    """Base of the argument records of operations: frozen pytrees, and canonical from the moment they exist.

    `class FlashAttentionArguments(ArgumentRecord, of=flash_attention)` has a keyword-only field for every argument of
    `flash_attention` but the call options, with its default. A field whose annotation holds arrays is a child of the
    pytree; every other one belongs to its structure, and so to the jit cache key. `__post_init__` makes it canonical.
    """

    public_function: ClassVar[Callable[..., Any]]
    """The public function whose arguments are the fields of the record."""

    if TYPE_CHECKING:
        __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]]

        def __init__(self, **fields: Any) -> None: ...

        def __getattr__(self, name: str) -> Any: ...

    def __init_subclass__(cls, *, of: Callable[..., Any]) -> None:
        super().__init_subclass__()
        signature = inspect.signature(of, eval_str=True)
        parameters = [parameter for name, parameter in signature.parameters.items() if name not in CALL_OPTIONS]
        cls.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        for parameter in parameters:
            default, child = _field_default(parameter), holds_arrays(parameter.annotation)
            setattr(cls, parameter.name, dataclasses.field(default=default) if child else static(default))
        cls.public_function = staticmethod(of)
        arguments(cls)


def _field_default(parameter: inspect.Parameter) -> Any:
    """Returns the default of a field. One that may be None can be left out of a record, though a caller has to say
    None.
    """
    if parameter.default is not parameter.empty:
        return parameter.default
    return None if type(None) in typing.get_args(parameter.annotation) else dataclasses.MISSING


def holds_arrays(annotation: Any) -> bool:
    """Returns whether values of an annotation are, or contain, arrays; functions that return some do not."""
    if typing.get_origin(annotation) is collections.abc.Callable:
        return False
    inner = typing.get_args(annotation)
    if inner:
        return any(map(holds_arrays, inner))
    return isinstance(annotation, type) and issubclass(annotation, PYTREE_CHILD_TYPES)
