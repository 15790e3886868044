"""Argument records: what a call was given, frozen and visible to JAX as a pytree."""

import dataclasses
import operator
from collections.abc import Callable, Iterable
from typing import Any, TypeVar, dataclass_transform

import jax

T = TypeVar("T")


def static(default: Any = dataclasses.MISSING) -> Any:
    """Declares a record field that is part of the structure (a jit cache key), not a leaf.

    Args:
        default: Value when the caller gives none; without it the field is required. Must be hashable.
    """
    return dataclasses.field(default=default, metadata={"static": True})


def array(axes: str, *, gradient: bool = False, default: Any = dataclasses.MISSING) -> Any:
    """Declares a field of a family's record that is an array.

    Args:
        axes: Its axis letters, from which sharding follows: `"b t h d"`.
        gradient: Whether it has a gradient.
        default: None for an optional array; without it the field is required.
    """
    return dataclasses.field(default=default, metadata={"axes": axes, "gradient": gradient})


def arrays_of_function(*, gradient: bool = False, default: Any = dataclasses.MISSING) -> Any:
    """Declares a field of a family's record that is a function with captured arrays, which every shard has whole.

    Args:
        gradient: Whether its floating arrays have a gradient.
        default: None for an optional function; without it the field is required.
    """
    return dataclasses.field(default=default, metadata={"axes": None, "gradient": gradient})


@dataclass_transform(
    frozen_default=True, kw_only_default=True, eq_default=False, field_specifiers=(static, array, arrays_of_function)
)
def arguments(cls: type[T]) -> type[T]:
    """Makes a class a frozen, keyword-only dataclass and a pytree.

    Fields declared with `static` are compared and hashed as structure; all others are children. JAX rebuilds
    records with leaves that are not arrays (specs, axis numbers, tracers), so rebuilding bypasses `__init__`.
    """
    record = dataclasses.dataclass(frozen=True, kw_only=True, eq=False)(cls)
    fields = dataclasses.fields(record)  # type: ignore[arg-type]
    dynamic = tuple(f.name for f in fields if not f.metadata.get("static"))
    fixed = tuple(f.name for f in fields if f.metadata.get("static"))

    children, structure = _fields_getter(dynamic), _fields_getter(fixed)

    def flatten(value: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        return children(value), structure(value)

    def flatten_with_keys(value: Any) -> tuple[tuple[tuple[Any, Any], ...], tuple[Any, ...]]:
        return tuple(zip(map(jax.tree_util.GetAttrKey, dynamic), children(value), strict=True)), structure(value)

    def unflatten(fixed_values: tuple[Any, ...], dynamic_values: Iterable[Any]) -> Any:
        value = object.__new__(record)
        for name, child in zip(dynamic + fixed, (*dynamic_values, *fixed_values), strict=True):
            object.__setattr__(value, name, child)
        return value

    jax.tree_util.register_pytree_with_keys(record, flatten_with_keys, unflatten, flatten)
    return record


def optional_fields(record: Any) -> dict[str, Any]:
    """Returns the fields of a record (or record type) that a caller may leave out, with their defaults."""
    return {f.name: f.default for f in dataclasses.fields(record) if f.default is not dataclasses.MISSING}


def non_default_fields(record: Any) -> tuple[str, ...]:
    """Returns names of the optional fields whose value differs from its default, in declaration order.

    A leaf field defaults to `None`, so an array that is there at all is given: comparing values would read the device.
    """
    return tuple(
        name
        for name, default in optional_fields(record).items()
        if _differs_from_default(getattr(record, name), default)
    )


def array_fields(record: Any) -> dict[str, Any]:
    """Returns the fields of a record that hold at least one leaf, with their values."""
    fixed = {f.name for f in dataclasses.fields(record) if f.metadata.get("static")}
    values = {f.name: getattr(record, f.name) for f in dataclasses.fields(record) if f.name not in fixed}
    return {name: value for name, value in values.items() if jax.tree.leaves(value)}


def _fields_getter(names: tuple[str, ...]) -> Callable[[Any], tuple[Any, ...]]:
    """Returns a function from a record to the tuple of the named fields; flattening is on the path of
    every eager call.
    """
    if len(names) > 1:
        return operator.attrgetter(*names)
    return lambda value: tuple(getattr(value, name) for name in names)


def _differs_from_default(value: Any, default: Any) -> bool:
    return value is not None if default is None else value != default
