"""Checks that padding tokens have no effect.

A family says which tokens those are with integer fields named `*segment_ids`: a negative id is padding. The fields
(and outputs) with one row for every token are those whose first axes are the ids' axes.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.families.contract import Family
from ejkernel.types.arguments import array_fields
from ejkernel_conformance import running
from ejkernel_conformance.compare import assert_close, assert_gradients_close
from ejkernel_conformance.subjects import Subject

SUFFIX = "segment_ids"


def check_padding(subject: Subject) -> None:
    """Checks that NaN in padding reaches no real output, and that outputs of padding are 0."""
    family, record = subject.op.family, padded(subject.record)
    run = running.on_records(subject)
    clean, poisoned = run(record), run(poison_record(family, record))
    assert_close(poisoned, clean, subject.tolerance, f"{subject}, NaN in padding")
    _assert_zero_outputs(subject, record, poisoned)


def check_padding_gradients(subject: Subject) -> None:
    """Checks that NaN in padding and in its cotangent reaches no real gradient, and that gradients of padding are 0."""
    family, record = subject.op.family, padded(subject.record)
    run = running.on_records_with_gradients(subject)
    output = jax.eval_shape(running.on_records(subject), record)
    cotangent = running.normal_like(output)
    _, clean = run(record, cotangent)
    _, poisoned = run(poison_record(family, record), poison_output(family, record, cotangent))
    assert_gradients_close(poisoned, clean, subject.tolerance, f"{subject}, NaN in padding")
    for name, gradient in poisoned.items():
        _assert_zero(
            gradient, _padding(family, record, family.axes_of(record).get(name)), f"{subject}, gradient of {name}"
        )


def has_segments(record: Any) -> bool:
    """Returns whether a record can have padding."""
    return any(name.endswith(SUFFIX) for name in array_fields(record))


def padded(record: Any) -> Any:
    """Returns the record with the last eighth of every row turned into padding, on top of earlier padding."""
    ids = {name: x for name, x in array_fields(record).items() if name.endswith(SUFFIX)}
    return dataclasses.replace(record, **{name: _with_padding(np.array(x)) for name, x in ids.items()})


def _with_padding(ids: np.ndarray) -> np.ndarray:
    ids[..., -max(1, ids.shape[-1] // 8) :] = -1
    return ids


def poison_record(family: Family, record: Any) -> Any:
    """Returns the record with NaN in the padding of its floating fields."""
    axes = family.axes_of(record)
    poisoned = {name: _poison(family, record, axes[name], x) for name, x in family.arrays_with_axes(record).items()}
    return dataclasses.replace(record, **poisoned)


def poison_output(family: Family, record: Any, output: Any) -> Any:
    """Returns a cotangent with NaN for every output of padding."""
    return jax.tree.map(lambda axes, x: _poison(family, record, axes, x), family.axes_of(record)["output"], output)


def _poison(family: Family, record: Any, axes: str, x: Any) -> Any:
    padding = _padding(family, record, axes)
    if padding is None or not jnp.issubdtype(x.dtype, jnp.floating):
        return x
    return np.where(_over(padding, x), np.asarray(jnp.nan, x.dtype), x)


def _padding(family: Family, record: Any, axes: str | None) -> np.ndarray | None:
    """Returns which tokens are padding, for arrays with these axes; None for arrays that are not made of tokens."""
    if axes is None:
        return None
    for name, ids in array_fields(record).items():
        if name.endswith(SUFFIX) and axes.split()[: ids.ndim] == family.axes_of(record)[name].split():
            return np.asarray(ids) < 0
    return None


def _over(padding: np.ndarray, x: Any) -> np.ndarray:
    return padding.reshape(*padding.shape, *(1,) * (x.ndim - padding.ndim))


def _assert_zero_outputs(subject: Subject, record: Any, output: Any) -> None:
    family = subject.op.family
    leaves = zip(jax.tree.leaves(family.axes_of(record)["output"]), jax.tree.leaves(output), strict=True)
    for axes, x in leaves:
        _assert_zero(x, _padding(family, record, axes), f"{subject}, output")


def _assert_zero(x: jax.Array, padding: np.ndarray | None, what: str) -> None:
    if padding is not None and np.any(np.asarray(x)[np.broadcast_to(_over(padding, x), x.shape)] != 0):
        raise AssertionError(f"{what}: padding is not 0")
