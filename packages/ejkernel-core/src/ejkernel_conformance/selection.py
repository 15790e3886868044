"""The implementations, operations and cases that a run of the suite tests."""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.ops.device import current_device
from ejkernel.ops.model import Case, Implementation, Op
from ejkernel.ops.params import Direction
from ejkernel.ops.plugins import registry
from ejkernel.types.arguments import non_default_fields
from ejkernel_conformance import row_states
from ejkernel_conformance.claims import record_refusals
from ejkernel_conformance.padding import has_segments
from ejkernel_conformance.requests import may_have_several
from ejkernel_conformance.running import is_floating
from ejkernel_conformance.subjects import Subject, abstract_args, abstract_record, differentiable_fields


@dataclasses.dataclass(frozen=True)
class Target:
    """An implementation with the cases of one operation that it is tested on.

    Attributes:
        op: The operation.
        implementation: The implementation.
        cases: The selected cases of the operation, and the implementation's own.
    """

    op: Op
    implementation: Implementation
    cases: tuple[Case, ...]

    @property
    def subjects(self) -> list[Subject]:
        """Returns the pairs of the implementation and each of its cases."""
        return [Subject(op=self.op, implementation=self.implementation, case=case) for case in self.cases]


@dataclasses.dataclass(frozen=True)
class FamilyTarget:
    """An implementation with the cases of all operations of its family, and for some tests one of its claims.

    Attributes:
        implementation: The implementation.
        cases: The cases with the selected tag, whichever operations were selected: a claim holds for the family.
        name: The claimed argument, gradient or invariance.
    """

    implementation: Implementation
    cases: tuple[tuple[Op, Case], ...]
    name: str = ""

    def __str__(self) -> str:
        of_family = (self.implementation.family, self.implementation.name)
        return "-".join(filter(None, (*of_family, *sorted(self.implementation.only or ()), self.name)))


@dataclasses.dataclass(frozen=True)
class Tunable:
    """An implementation's candidates in one direction, and the case they are tried on."""

    subject: Subject
    direction: Direction
    parts: tuple[Any, ...]

    def __str__(self) -> str:
        return f"{self.subject.op.name}-{self.subject.implementation.name}-{self.direction}"


@dataclasses.dataclass(frozen=True)
class Selection:
    """The operations, implementations and cases of a run; an empty tuple of names selects all."""

    ops: tuple[str, ...]
    implementations: tuple[str, ...]
    tag: str

    def unknown(self) -> str:
        """Says which of the names do not exist; empty if there is none."""
        found = registry()
        names = {i.name for op in found.ops for i in found.implementations.get(op, ())}
        wrong = [f"operation {name!r}" for name in self.ops if name not in found.ops]
        wrong += [f"implementation {name!r}" for name in self.implementations if name not in names]
        failed = "".join(f"\nplugin {p.name} ({p.distribution}) not loaded: {p.error}" for p in found.failed)
        return f"there is no {', no '.join(wrong)}{failed}" if wrong else ""

    def of(self, parameter: str) -> list[Any]:
        """Returns what the tests that ask for one of the plugin's parameters are run on."""
        subjects = _subjects(self)
        made: dict[str, Callable[[], Iterable[Any]]] = {
            "ejk_subject": lambda: subjects,
            "ejk_differentiable": lambda: filter(_can_be_differentiated, subjects),
            "ejk_forward_mode": lambda: _with_forward_mode(self),
            "ejk_row_states": lambda: filter(_has_row_states, subjects),
            "ejk_kernel_indexed": lambda: filter(_is_kernel_with_integers, subjects),
            "ejk_kernel_on_gpu": lambda: filter(_is_kernel, subjects) if current_device().platform == "gpu" else (),
            "ejk_padded": lambda: filter(_can_be_padded, subjects),
            "ejk_padded_differentiable": lambda: filter(_can_be_differentiated, filter(_can_be_padded, subjects)),
            "ejk_requests": lambda: filter(_may_have_requests, subjects),
            "ejk_requests_differentiable": lambda: filter(_can_be_differentiated, filter(_may_have_requests, subjects)),
            "ejk_implementation": lambda: _family_targets(self),
            "ejk_claim": lambda: _claims(self, lambda i: i.requires.handles),
            "ejk_gradient": lambda: _claims(self, lambda i: i.gradients),
            "ejk_invariance": lambda: _claims(self, lambda i: i.invariant_to),
            "ejk_candidates": lambda: _tunables(self),
        }
        return list(made[parameter]())


@functools.cache
def _targets(selection: Selection) -> tuple[Target, ...]:
    found = registry()
    return tuple(
        Target(op, implementation, _cases(op, selection.tag, implementation))
        for op in sorted(found.ops.values(), key=lambda op: op.name)
        if not selection.ops or op.name in selection.ops
        for implementation in found.implementations.get(op.name, ())
        if not selection.implementations or implementation.name in selection.implementations
    )


@functools.cache
def _family_targets(selection: Selection) -> tuple[FamilyTarget, ...]:
    """Returns the selected implementations, each once, with the cases of every operation that they are
    registered for.
    """
    found = registry()
    selected = {id(target.implementation): target.implementation for target in _targets(selection)}
    return tuple(
        FamilyTarget(
            implementation,
            tuple(
                (op, case)
                for op in sorted(found.ops.values(), key=lambda op: op.name)
                if implementation in found.implementations.get(op.name, ())
                for case in _cases(op, selection.tag, implementation)
            ),
        )
        for implementation in selected.values()
    )


@functools.cache
def _cases(op: Op, tag: str, implementation: Implementation) -> tuple[Case, ...]:
    """Returns the cases of an operation, and the implementation's own, with a tag.

    Where the host has enabled x64, those of float32 are there in float64 as well.
    """
    tagged = tuple(case for case in (*op.cases, *implementation.cases_of(op)) if tag in case.tags)
    if jnp.result_type(float) != jnp.float64 or "float64" not in op.tolerance:
        return tagged
    single = (case for case in tagged if op.family.dtype(abstract_record(op, case)) == jnp.float32)
    return tagged + tuple(map(_in_float64, single))


def _in_float64(case: Case) -> Case:
    def make(key: Any) -> Any:
        return jax.tree.map(lambda x: x.astype(jnp.float64) if x.dtype == jnp.float32 else x, case.make(key))

    return dataclasses.replace(case, name=f"{case.name}, float64", make=make)


@functools.cache
def _subjects(selection: Selection) -> tuple[Subject, ...]:
    # Cached, so that all tests of a case get the same object and with it what was computed for it.
    return tuple(subject for target in _targets(selection) for subject in target.subjects)


def _with_forward_mode(selection: Selection) -> Iterator[Subject]:
    """Returns, for each operation of implementations with `forward_mode`, the case that it serves with the most
    options.
    """
    for target in _targets(selection):
        subjects = list(filter(_has_tangents, target.subjects)) if target.implementation.forward_mode else []
        if subjects:
            yield max(subjects, key=lambda s: len(non_default_fields(abstract_record(s.op, s.case))))


def _has_tangents(subject: Subject) -> bool:
    record = abstract_record(subject.op, subject.case)
    fields = differentiable_fields(subject.op.family, record)
    return _can_be_differentiated(subject) and not any(subject.implementation.forward_mode_limits(record, fields))


def _has_row_states(subject: Subject) -> bool:
    """Returns whether an implementation has a function for states of rows, and a case has rows that may be split."""
    if subject.implementation.row_states is None:
        return False
    return row_states.can_be_summarised(subject.op.family, abstract_record(subject.op, subject.case))


def _is_kernel_with_integers(subject: Subject) -> bool:
    """Returns what is traced as plain JAX is batched by JAX, primitive by primitive, and would be slow to ask twice."""
    indexed = not all(map(is_floating, jax.tree.leaves(abstract_args(subject.case))))
    return indexed and _is_kernel(subject)


def _is_kernel(subject: Subject) -> bool:
    return subject.implementation.platform != "xla"


def _can_be_padded(subject: Subject) -> bool:
    return has_segments(abstract_record(subject.op, subject.case))


def _may_have_requests(subject: Subject) -> bool:
    return may_have_several(subject.op.family, abstract_record(subject.op, subject.case))


def _can_be_differentiated(subject: Subject) -> bool:
    return bool(differentiable_fields(subject.op.family, abstract_record(subject.op, subject.case)))


def _claims(selection: Selection, names: Callable[[Implementation], Iterable[str]]) -> Iterator[FamilyTarget]:
    for target in _family_targets(selection):
        for name in sorted(names(target.implementation)):
            yield dataclasses.replace(target, name=name)


def _tunables(selection: Selection) -> Iterator[Tunable]:
    """Returns, for each implementation and direction with candidates, the case that has most candidates."""
    for target in _targets(selection):
        for direction in _directions(target.implementation):
            options = [(subject, _candidates(subject, direction)) for subject in target.subjects]
            subject, parts = max(options, key=lambda option: len(option[1]), default=(None, ()))
            if subject is not None and parts:
                yield Tunable(subject, direction, parts)


def _directions(implementation: Implementation) -> tuple[Direction, ...]:
    """Returns what an implementation has configurations for."""
    if implementation.paired:
        return ("both",)
    return ("forward", "backward") if implementation.backward else ("forward",)


def _candidates(subject: Subject, direction: Direction) -> tuple[Any, ...]:
    record = abstract_record(subject.op, subject.case)
    if record_refusals(subject.op, subject.implementation, record):
        return ()
    return tuple(dict.fromkeys(subject.implementation.config.candidates(record, current_device(), direction)))
