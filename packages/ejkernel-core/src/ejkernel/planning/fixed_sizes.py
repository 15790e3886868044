"""A record of shapes in which sizes that depend on the batch are fixed, for rules that must not depend on them."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax

from ejkernel.types.arguments import array_fields


def with_fixed_sizes(record: Any, axes: Mapping[str, Any], sizes: Mapping[str, int]) -> Any:
    """Returns a record of shapes in which the axes in `sizes` have the given sizes; axes that broadcast keep size 1.

    A configuration rule that is called with this record cannot depend on the batch.

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
    """Returns whether axes of size 1 of an array may broadcast, as those of optional arrays do."""
    return next(field for field in dataclasses.fields(record) if field.name == name).default is not dataclasses.MISSING
