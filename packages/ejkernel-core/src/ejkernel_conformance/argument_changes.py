"""Changed calls of operations that share rows with a call, for rows that are computed outside of kernels."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from ejkernel.ops.model import Op
from ejkernel.types.arguments import array_fields
from ejkernel_conformance.row_changes import Change, take, whole

_ROW_LETTERS = {"expert_routing": "t"}
"""The axis of rows by family, for families whose rows are not those of axis `b`."""

_OUTPUTS_OF_THE_WHOLE_CALL = {"expert_routing": (1,)}
"""Outputs with rows that depend on the other rows by definition, such as the positions of sorted tokens."""


def changes_of_arguments(op: Op, args: Any) -> Iterator[Change]:
    """Yields changed calls, whose records are argument records, for the kinds of invariance `batch` and `chunking`.

    Args:
        op: The operation.
        args: Its argument record, with rows that each are one sequence.
    """
    axes = _axes(op, args)
    letter = _ROW_LETTERS.get(op.family.name, "b")
    rows = _size(args, axes, letter)
    compared = _row_axes(op, args, letter)
    twice = np.tile(np.arange(rows)[::-1], 2)
    for how, index in (("the last row alone", np.array([rows - 1])), ("rows in reverse, twice", twice)):
        selected = tuple((take(index, axis), whole) if axis is not None else None for axis in compared)
        yield Change("batch", how, _with_axis(args, axes, letter, index), selected)
    if "initial_state" in axes:
        tokens = _size(args, axes, "t")
        first, last = np.arange(tokens - 1), np.arange(tokens - 1, tokens)
        before = _with_axis(args, axes, "t", first)
        yield Change("chunking", "all tokens but the last", before, ((take(first, 1), whole),))
        after = _with_axis(args, axes, "t", last)
        yield Change("chunking", "the last token alone", after, ((take(last, 1), whole), (whole, whole)), before)


def _axes(op: Op, args: Any) -> dict[str, list[str]]:
    """Returns the axis letters of the arrays of a call that have rows or tokens."""
    letters, _ = op.letters(args)
    letters.setdefault("initial_state", "b")  # RWKV's recurrences take it by name only
    return {name: letters[name].split() for name in array_fields(args) if name in letters}


def _row_axes(op: Op, args: Any, letter: str) -> list[int | None]:
    """Returns the axis of rows of each array that a call returns; None for arrays that are not compared."""
    output = op.letters(args)[1]
    if output is None:
        output = op.family.axes_of(jax.eval_shape(op.lower, args))["output"]
    axes = [letters.split() for letters in jax.tree.leaves(output)]
    left_out = _OUTPUTS_OF_THE_WHOLE_CALL.get(op.family.name, ())
    return [x.index(letter) if letter in x and n not in left_out else None for n, x in enumerate(axes)]


def _size(args: Any, axes: dict[str, list[str]], letter: str) -> int:
    name = next(name for name, letters in axes.items() if letter in letters)
    return getattr(args, name).shape[axes[name].index(letter)]


def _with_axis(args: Any, axes: dict[str, list[str]], letter: str, index: np.ndarray) -> Any:
    changes = {
        name: np.take(getattr(args, name), index, axis=letters.index(letter))
        for name, letters in axes.items()
        if letter in letters
    }
    return dataclasses.replace(args, **changes)
