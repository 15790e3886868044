"""A record of shapes in which the sizes that depend on the batch are fixed, for rules that have to ignore them."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax

from ejkernel.types.arguments import array_fields


def with_fixed_sizes(record: Any, axes: Mapping[str, Any], sizes: Mapping[str, int]) -> Any:
    """Returns a record of shapes, with some axes of a fixed size; an axis of size 1 that broadcasts keeps it.

    A configuration rule that is given this record cannot depend on the batch.

    Args:
        record: The family record.
        axes: Axis letters of its arrays, as `Family.axes_of` returns them.
        sizes: Axis letter -> size.
    """
    changes: dict[str, Any] = {}
    for name, x in array_fields(record).items():
        letters = str(axes[name]).split()
        if len(letters) == len(x.shape):
            shape = tuple(
                sizes.get(letter, size) if size != 1 or not _broadcasts(name, record) else size
                for letter, size in zip(letters, x.shape, strict=True)
            )
            changes[name] = jax.ShapeDtypeStruct(shape, x.dtype)
    return dataclasses.replace(record, **changes)


def _broadcasts(name: str, record: Any) -> bool:
    """Returns whether an array may have axes of size 1 for any size: those that are optional."""
    return next(field for field in dataclasses.fields(record) if field.name == name).default is not dataclasses.MISSING
