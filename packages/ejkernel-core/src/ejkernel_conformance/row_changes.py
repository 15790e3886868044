"""A changed call that shares rows with a call, and the changes of calls whose rows are those of one axis."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from ejkernel.families.contract import Family
from ejkernel.types.arguments import array_fields

Select = Callable[[np.ndarray], np.ndarray]


@dataclasses.dataclass(frozen=True)
class Change:
    """A changed call.

    Attributes:
        name: What it is about, a name of `INVARIANCES`.
        how: What was changed, in a few words.
        record: The changed record.
        rows: For each output, its rows in the call and in the changed call; None for one that is not compared.
        before: A record that runs first, whose final states `record` begins with. None for no record.
        states: The fields of `record` that are such states, and the outputs of `before` that they are.
    """

    name: str
    how: str
    record: Any
    rows: tuple[tuple[Select, Select] | None, ...]
    before: Any = None
    states: tuple[tuple[str, int], ...] = (("initial_state", 1),)

    def __str__(self) -> str:
        return f"{self.name}, {self.how}"


def take(index: Any, axis: int = 0) -> Select:
    return lambda x: np.take(x, index, axis=axis)


def whole(x: np.ndarray) -> np.ndarray:
    return x


def with_axis(family: Family, record: Any, letter: str, index: np.ndarray, size: int) -> Any:
    """Returns the record with the entries `index` along an axis of `size`, in all arrays that have the axis."""
    axes, changes = family.axes_of(record), dict[str, Any]()
    for name, x in array_fields(record).items():
        letters = list[str]((axes[name] or "").split())
        if letter in letters and len(letters) == x.ndim and x.shape[letters.index(letter)] == size:
            changes[name] = np.take(x, index, axis=letters.index(letter))
    return dataclasses.replace(record, **changes)


def changes_of_rows(family: Family, record: Any, letter: str = "b") -> Iterator[Change]:
    """Yields a call with the last row of axis `b` alone, and one with the rows in reverse, each twice."""
    axes = family.axes_of(record)
    outputs = [letters.split() for letters in jax.tree.leaves(axes["output"])]
    if not outputs or any(letter not in letters for letters in outputs):
        return
    sizes = {
        x.shape[axes[name].split().index(letter)]
        for name, x in array_fields(record).items()
        if letter in axes[name].split()
    }
    rows = max(sizes, default=0)
    if rows < 1 or sizes - {1, rows}:
        return
    # With a single row, arrays that broadcast over rows cannot be told from arrays of that row.
    indices = {"the last row alone": np.array([rows - 1])} if rows > 1 else {}
    if rows > 1:
        indices["rows in reverse, twice"] = np.tile(np.arange(rows)[::-1], 2)
    for how, index in indices.items():
        selected = tuple((take(index, at.index(letter)), whole) for at in outputs)
        yield Change("batch", how, with_axis(family, record, letter, index, rows), selected)
