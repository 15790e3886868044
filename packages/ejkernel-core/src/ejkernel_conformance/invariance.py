"""Checks that no bit of a row depends on what else is in the call, for every name that an implementation claims.

The call of a case is changed in the ways that a name in `ejkernel.types.invariances.INVARIANCES` stands for: a row
alone or among others, more padding, a segment that is cut out of a packed row, fewer queries of each sequence, the
pages of the cache in another order or of another size. Both calls run in a `batch_invariant` block, and the rows that
they share must have the same bits. Changed calls that dispatch refuses are skipped, except those of another batch:
another kernel would serve them, with other bits. The check fails if no case tests the claim.

Records begin after what an operation computes outside of the kernel, such as norms of queries and keys. So whole calls
of the operations of the family that have a case with `ROW_FUNCTIONS_TAG` are changed and compared, too.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from ejkernel.modules.operations.cases.tables import ROW_FUNCTIONS_TAG
from ejkernel.ops.batch_invariance import batch_invariant, invariance_refusals
from ejkernel.ops.device import current_device
from ejkernel.ops.dispatch import refusals
from ejkernel.ops.grad import differentiable_call
from ejkernel.ops.model import LONG_ROWS_TAG, Case, Implementation, Op
from ejkernel.types.arguments import non_default_fields
from ejkernel_conformance.argument_changes import changes_of_arguments
from ejkernel_conformance.covering import Candidate, cover
from ejkernel_conformance.invariance_changes import CHANGES_BY_FAMILY
from ejkernel_conformance.row_changes import Change, changes_of_rows
from ejkernel_conformance.selection import FamilyTarget
from ejkernel_conformance.subjects import PinnedPlan, abstract_record, inputs, lowered, pinned_plan

MAX_CASES = 2
"""Number of cases that test a claim; each compiles a program for each changed call."""


def check_invariance(target: FamilyTarget) -> None:
    """Checks one claim of an implementation on two cases, which together have as many arguments as possible.

    Raises:
        AssertionError: A bit of a row changes, or no case tests the claim.
    """
    shown = 0
    for op, case in _ordered(target):
        if shown == MAX_CASES:
            break
        shown += _check_case(op, target.implementation, case, target.name)
    if not shown:
        raise AssertionError(
            f"{target.implementation.name} claims to be invariant to {target.name}, and no case shows it"
        )
    for op in {op.name: op for op, _ in target.cases}.values():
        for case in op.cases:
            if ROW_FUNCTIONS_TAG in case.tags:
                _check_call(op, target.implementation, case, target.name)


def served(op: Op, implementation: Implementation, record: Any) -> bool:
    """Returns whether an implementation serves a record here, in a `batch_invariant` block."""
    device = current_device()
    reasons = (
        *refusals(op.family, implementation, record, device, "auto", "forward", frozenset()),
        *invariance_refusals(op, implementation, record),
    )
    return not reasons


def _ordered(target: FamilyTarget) -> list[tuple[Op, Case]]:
    """Returns the cases that are served, ordered so that the first few cover the most arguments and dtypes."""
    name, implementation = target.name, target.implementation
    cases = [
        (op, case)
        for op, case in target.cases
        if served(op, implementation, record := abstract_record(op, case)) and name in op.family.invariances(record)
    ]
    candidates = [Candidate(frozenset(_features(op, abstract_record(op, case)))) for op, case in cases]
    # One case with long rows comes first: without it, no claim would be tested on a row of several splits.
    long = [n for n, (_, case) in enumerate(cases) if LONG_ROWS_TAG in case.tags][:1]
    first = [*long, *(n for n in cover(candidates) if n not in long)]
    return [cases[n] for n in (*first, *(n for n in range(len(cases)) if n not in first))]


def _features(op: Op, record: Any) -> Iterator[str]:
    yield op.name
    yield str(op.family.dtype(record))
    yield from non_default_fields(record)


def _check_case(op: Op, implementation: Implementation, case: Case, name: str) -> bool:
    """Checks a claim on a case; returns whether a changed call was served."""
    record = jax.tree.map(np.asarray, lowered(op, case))
    make = CHANGES_BY_FAMILY.get(op.family.name, changes_of_rows)
    changes = [change for change in make(op.family, record) if change.name == name]
    for change in changes:
        if name == "batch" and not served(op, implementation, change.record):
            raise AssertionError(
                f"{op.name}-{implementation.name}-{case.name}, {change}: it serves only the first call"
            )
    changes = [change for change in changes if served(op, implementation, change.record)]
    if not changes:
        return False
    run = _compiled(op, implementation)
    outputs = run(record)
    for change in changes:
        changed = change.record
        if change.before is not None:
            found = run(change.before)
            changed = dataclasses.replace(changed, **{name: found[n] for name, n in change.states})
        _assert_same_rows(change, run(changed), outputs, f"{op.name}-{implementation.name}-{case.name}")
    return True


def _check_call(op: Op, implementation: Implementation, case: Case, name: str) -> None:
    """Checks a claim on whole calls of an operation, if the implementation serves the case."""
    args = jax.tree.map(np.asarray, inputs(case, 0))
    if not served(op, implementation, abstract_record(op, case)):
        return
    changes = [change for change in changes_of_arguments(op, args) if change.name == name]
    run = _compiled_call(op, implementation)
    outputs = run(args) if changes else []
    for change in changes:
        changed = change.record
        if change.before is not None:
            changed = dataclasses.replace(changed, initial_state=run(change.before)[1])
        _assert_same_rows(change, run(changed), outputs, f"{op.name}-{implementation.name}-{case.name}, the call")


@functools.cache
def _compiled(op: Op, implementation: Implementation) -> Callable[[Any], list[np.ndarray]]:
    plan = _plan(op, implementation)
    return _in_block(jax.jit(lambda record: differentiable_call(plan, record)))


@functools.cache
def _compiled_call(op: Op, implementation: Implementation) -> Callable[[Any], list[np.ndarray]]:
    plan = _plan(op, implementation)
    return _in_block(jax.jit(lambda args: op.finish(args, differentiable_call(plan, op.lower(args)))))


def _plan(op: Op, implementation: Implementation) -> PinnedPlan:
    return dataclasses.replace(pinned_plan(op, implementation), isolates_sequences=True, batch_invariant=True)


def _in_block(run: Callable[[Any], Any]) -> Callable[[Any], list[np.ndarray]]:
    def outputs(argument: Any) -> list[np.ndarray]:
        with batch_invariant():  # the calls within kernels are made in the block, too
            return [np.asarray(x) for x in jax.tree.leaves(run(argument))]

    return outputs


def _assert_same_rows(change: Change, changed: list[np.ndarray], outputs: list[np.ndarray], what: str) -> None:
    for n, selects in enumerate(change.rows):
        if selects is None:
            continue
        select, select_changed = selects
        want, got = select(outputs[n]), select_changed(changed[n])
        if want.shape != got.shape or want.size == 0:
            raise AssertionError(f"{what}, {change}: got rows {got.shape}, wants {want.shape}, not empty")
        if want.tobytes() == got.tobytes():
            continue
        different = want.astype(np.float64) != got.astype(np.float64)
        raise AssertionError(f"{what}, {change}: {int(different.sum())} of {want.size} entries of the same rows differ")
