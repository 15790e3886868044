"""One shard of a call, as `shard_map` makes it, without needing more than one device.

The shard is the last one of a call cut in two along every axis that may be cut, so that its record carries whatever a
family adds to make a part mean its part of the whole (positions, dropout counters): fields that no public argument
gives.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.families.contract import Family
from ejkernel_conformance import running
from ejkernel_conformance.compare import assert_close
from ejkernel_conformance.subjects import Subject


def check_shard(subject: Subject) -> None:
    """Checks that the output of the last shard of a call is that part of the reference's output.

    An output that is a sum over a cut axis has size 1 there on each shard, and is the reference's of the shard.
    """
    family, record = subject.op.family, subject.record
    shard = jax.jit(lambda record: last_shard(family, record))(record)
    got = running.on_records(subject)(shard)
    whole, _ = running.family_answer(subject.op, subject.case)
    starts, axes = cuts(family, record), family.axes_of(record)["output"]
    want = jax.tree.map(lambda axes, x: _tail(np.asarray(x), axes, starts), axes, whole)
    if any(jax.tree.leaves(jax.tree.map(lambda axes, x: _is_sum(x, axes, starts), axes, whole))):
        part, _ = jax.jit(family.reference)(shard)
        want = jax.tree.map(lambda axes, x, y: y if _is_sum(x, axes, starts) else x, axes, want, part)
    assert_close(got, want, subject.tolerance, f"{subject}, last shard")


def last_shard(family: Family, record: Any) -> Any:
    """Returns the record of the last shard; the record itself where nothing can be cut."""
    starts, letters = cuts(family, record), family.axes_of(record)
    parts = {name: _tail(x, letters[name], starts) for name, x in family.arrays_with_axes(record).items()}
    offsets = {letter: jnp.int32(start) for letter, start in starts.items()}
    return family.apply_shard_offsets(dataclasses.replace(record, **parts), offsets)


def abstract_last_shard(family: Family, record: Any) -> Any:
    """Returns the shapes of the last shard's record; the record may be one of shapes."""
    return jax.eval_shape(lambda record: last_shard(family, record), record)


def cuts(family: Family, record: Any) -> dict[str, int]:
    """Returns where the last shard begins, for every axis letter that is cut."""
    axes, shardable = family.axes_of(record), family.shardable_axes_of(record)
    sizes = {
        letter: size
        for name, x in family.arrays_with_axes(record).items()
        for letter, size in zip(axes[name].split(), x.shape, strict=True)
        if size > 1 and letter in shardable
    }
    for pair in family.aligned_axes_of(record):
        aligned = [letter for letter in pair if letter in sizes]
        if any(sizes[letter] % 2 for letter in aligned):
            sizes = {letter: size for letter, size in sizes.items() if letter not in pair}
    return {letter: size // 2 for letter, size in sizes.items()}


def _is_sum(x: Any, axes: str, starts: Mapping[str, int]) -> bool:
    """Returns whether an output has size 1 along an axis that is cut."""
    return any(letter in starts and size == 1 for letter, size in zip(axes.split(), x.shape, strict=True))


def _tail(x: Any, axes: str, starts: Mapping[str, int]) -> Any:
    """Returns the last shard's part of an array; axes of size 1 are shared by all."""
    letters = zip(axes.split(), x.shape, strict=True)
    return x[tuple(slice(starts.get(letter, 0) if size > 1 else 0, None) for letter, size in letters)]
