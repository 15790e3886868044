"""Checks that no value of one request reaches another request.

`Family.requests` says which entries of a record's arrays, and of its outputs, belong to which request. The requests of
a case are numbered, and every second one is poisoned with NaN, infinities and the largest numbers, those that arrive
together with its output's cotangent too. The outputs, final states and gradients of the others must keep their bits:
products, sums and the choice of a path may not depend on what another request holds. Then the two halves change places.

Kernels of Mosaic GPU rescale an accumulator where some row of a warp asks for it, so that a row's last digit may depend
on its neighbours: there, entries are compared within the operation's tolerance. Its backward kernels multiply masked
weights with gradients of weights, so the largest numbers there are those whose products are finite.

Calls are made under `isolate_sequences`, which attention with segment ids needs; to others it makes no difference.

Free slots of a cache and padding tokens are poisoned both times.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.families.contract import Family
from ejkernel.ops.device import current_device
from ejkernel.planning.requests import PADDING, UNUSED
from ejkernel.types.arguments import array_fields
from ejkernel_conformance import running
from ejkernel_conformance.padding import padded
from ejkernel_conformance.subjects import Subject

Owners = dict[str, np.ndarray]
"""Owners of the entries of fields and of `"output.0"`, `"output.1"`, ..., each broadcastable to its array."""

OUTPUT = "output"


@dataclasses.dataclass(frozen=True)
class Poison:
    """One way to poison a record: which entries are poisoned, and with what.

    Attributes:
        owners: Of the record's arrays and of its outputs.
        values: What the entries of every poisoned request hold.
    """

    owners: Owners
    values: Mapping[int, float]

    def into(self, name: str, x: Any) -> Any:
        """Returns an array with its poisoned entries replaced."""
        owners = self.owners.get(name)
        if owners is None or not jnp.issubdtype(x.dtype, jnp.floating):
            return x
        owners, x = np.broadcast_to(owners, x.shape), np.array(x)
        for request, value in self.values.items():
            x = np.where(owners == request, _representable(value, x.dtype), x)
        return x

    def spared(self, name: str, x: Any) -> np.ndarray | None:
        """Returns the entries of an array that belong to requests that are not poisoned, flat; None where
        it is shared.
        """
        owners = self.owners.get(name)
        if owners is None or not running.is_floating(x):
            return None
        owners = np.broadcast_to(owners, x.shape)
        return np.asarray(x)[(owners >= 0) & ~np.isin(owners, list(self.values))]

    def of_padding(self, name: str, x: Any) -> np.ndarray | None:
        """Returns the entries of an array that are padding."""
        owners = self.owners.get(name)
        if owners is None or not running.is_floating(x):
            return None
        return np.asarray(x)[np.broadcast_to(owners, x.shape) == PADDING]


def check_requests(subject: Subject) -> None:
    """Checks that the values of one request reach no output of another request."""
    run, record = running.on_records(subject, isolates=True), with_padding(subject.record)
    clean = _outputs(run(record))
    for poison in poisons(subject.op.family, record, _largest(subject)):
        poisoned = _outputs(run(poison_record(poison, record)))
        _assert_spared(poison, poisoned, clean, _allowed(subject), str(subject))
        _assert_padding_is_zero(poison, poisoned, str(subject))


def check_request_gradients(subject: Subject) -> None:
    """Checks that the values and the cotangent of one request reach no gradient of another request."""
    record, run = with_padding(subject.record), running.on_records_with_gradients(subject, isolates=True)
    cotangent = running.record_cotangent(subject)
    clean: Any = None
    for poison in poisons(subject.op.family, record, _largest(subject)):
        clean = run(record, cotangent)[1] if clean is None else clean
        leaves, structure = jax.tree.flatten(cotangent)
        given = [poison.into(f"{OUTPUT}.{n}", x) for n, x in enumerate(leaves)]
        poisoned = run(poison_record(poison, record), jax.tree.unflatten(structure, given))[1]
        _assert_spared(poison, poisoned, clean, _allowed(subject), f"{subject}, gradient")
        _assert_padding_is_zero(poison, poisoned, f"{subject}, gradient")


def with_padding(record: Any) -> Any:
    """Returns the record with the last eighth of its tokens turned into padding, in addition to what is padding
    already.
    """
    record = padded(record)
    bounds = getattr(record, "cu_seqlens", None)
    if bounds is None:
        return record
    last = int(bounds[-1]) - max(1, int(bounds[-1]) // 8)
    return dataclasses.replace(record, cu_seqlens=np.minimum(np.asarray(bounds), last))


def may_have_several(family: Family, record: Any) -> bool:
    """Returns whether a record of these shapes may be of several requests."""
    letters = family.axes_of(record)
    indexed = any(not running.is_floating(x) for x in array_fields(record).values())
    rows = any(
        x.shape[letters[name].split().index("b")] > 1
        for name, x in family.arrays_with_axes(record).items()
        if "b" in letters[name].split() and len(letters[name].split()) == x.ndim
    )
    return rows or (family.requests is not None and indexed)


def poisons(family: Family, record: Any, largest: float = np.inf) -> Iterator[Poison]:
    """Yields two poisons for each way in which a record's arrays belong to requests, and none for arrays of a single
    request.
    """
    for owners in owners_of(family, record):
        present = [np.unique(x) for x in owners.values()]
        known = np.unique(np.concatenate([x[x >= 0] for x in present])) if present else np.zeros(0, int)
        if known.size < 2:
            continue
        for half in (0, 1):
            values = dict(zip(known[half::2].tolist(), _kinds(half, largest), strict=False))
            yield Poison(owners, {**values, PADDING: np.nan, UNUSED: np.nan})


def owners_of(family: Family, record: Any) -> list[Owners]:
    """Returns the owners of a record's arrays and outputs, in each way in which the family describes them."""
    described = family.requests(record) if family.requests is not None else _by_rows(family, record)
    arrays = family.arrays_with_axes(record)
    output = jax.tree.leaves(jax.eval_shape(family.reference, record)[0])
    letters = {name: family.axes_of(record)[name] for name in arrays}
    named = {f"{OUTPUT}.{n}": axes for n, axes in enumerate(jax.tree.leaves(family.axes_of(record)[OUTPUT]))}
    shapes = {name: x.shape for name, x in arrays.items()} | {f"{OUTPUT}.{n}": x.shape for n, x in enumerate(output)}
    letters |= named
    found = []
    for keys in described:
        keys = {f"{OUTPUT}.0" if key == OUTPUT else key: owners for key, owners in keys.items()}
        of_fields = {name: _owners(keys, name, letters[name], shapes[name]) for name in shapes}
        found.append({name: owners for name, owners in of_fields.items() if owners is not None})
    return found


def _by_rows(family: Family, record: Any) -> list[dict[str, Any]]:
    """Returns the owners where a family says nothing: the rows of axis `b`."""
    letters = family.axes_of(record)
    sizes = [
        x.shape[letters[name].split().index("b")]
        for name, x in family.arrays_with_axes(record).items()
        if "b" in letters[name].split()
    ]
    return [{"b": np.arange(max(sizes))}] if sizes else []


def _owners(keys: Mapping[str, Any], name: str, letters: str, shape: tuple[int, ...]) -> np.ndarray | None:
    """Returns the owners of one array, broadcastable to it; None where it is shared."""
    if name in keys:
        return np.asarray(keys[name])
    axes = letters.split()
    for key in sorted(keys, key=lambda key: -len(key.split())):
        wanted, owners = key.split(), np.asarray(keys[key])
        if not set(wanted) <= set(axes) or len(axes) != len(shape):
            continue
        at = [axes.index(letter) for letter in wanted]
        if owners.shape != tuple(shape[i] for i in at):
            continue
        order = np.argsort(at)
        sizes = [shape[i] if i in at else 1 for i in range(len(shape))]
        return owners.transpose(order).reshape(sizes)
    return None


def poison_record(poison: Poison, record: Any) -> Any:
    """Returns a record with its poisoned entries replaced."""
    return dataclasses.replace(record, **{name: poison.into(name, x) for name, x in array_fields(record).items()})


def _kinds(half: int, largest: float) -> Iterator[float]:
    kinds = (np.nan, np.inf, -np.inf, min(largest, np.finfo(np.float64).max))
    n = 3 * half  # one request of each half may be all there is
    while True:
        yield kinds[n % len(kinds)]
        n += 1


def _representable(value: float, dtype: Any) -> Any:
    """Returns a value in a dtype: the largest number of it, and NaN where it has no infinity."""
    info = jnp.finfo(dtype)
    with np.errstate(over="ignore"):
        return np.asarray(min(value, float(info.max)) if np.isfinite(value) else value).astype(dtype)


def _outputs(output: Any) -> dict[str, Any]:
    return {f"{OUTPUT}.{n}": x for n, x in enumerate(jax.tree.leaves(output))}


def _allowed(subject: Subject) -> float:
    """Returns how much entries may change, in parts of the largest of their array."""
    return subject.tolerance.rtol if _is_mosaic_gpu(subject) else 0.0


def _largest(subject: Subject) -> float:
    """Returns the largest numbers to poison with: products of two of them in Mosaic GPU's backward
    kernels stay finite.
    """
    return 2.0**59 if _is_mosaic_gpu(subject) else np.inf


def _is_mosaic_gpu(subject: Subject) -> bool:
    return subject.implementation.platform == "pallas" and current_device().platform == "gpu"


def _assert_spared(poison: Poison, got: dict[str, Any], want: dict[str, Any], allowed: float, what: str) -> None:
    for name, x in got.items():
        ours, theirs = poison.spared(name, x), poison.spared(name, want[name])
        if ours is None or theirs is None or ours.tobytes() == theirs.tobytes():
            continue
        wide, other = ours.astype(np.float64), theirs.astype(np.float64)
        with np.errstate(invalid="ignore"):
            error = np.abs(wide - other)
        largest = np.max(np.abs(np.where(np.isfinite(other), other, 0)), initial=0)
        wrong = ~((error <= allowed * largest) | (wide == other))
        if allowed and not wrong.any():
            continue
        raise AssertionError(
            f"{what}, {name}: {int(wrong.sum())} of {wrong.size} entries of other requests changed, "
            f"{int((~np.isfinite(wide) & np.isfinite(other)).sum())} of them to no finite number, others by at most "
            f"{np.nanmax(np.where(np.isfinite(error), error, 0), initial=0):.3g}"
        )


def _assert_padding_is_zero(poison: Poison, got: dict[str, Any], what: str) -> None:
    for name, x in got.items():
        found = poison.of_padding(name, x)
        # The lse of nothing is -inf.
        if found is not None and np.any((found != 0) & (found.astype(np.float64) != -np.inf)):
            raise AssertionError(f"{what}, {name}: padding is not 0")
