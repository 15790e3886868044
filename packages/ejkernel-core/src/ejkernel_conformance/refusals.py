"""Refusals: each is a reason, and the error of a refused call holds all of them."""

from typing import Any

import jax

from ejkernel.errors import NoImplementationError
from ejkernel.ops.device import current_device
from ejkernel.ops.dispatch import hardware_refusals
from ejkernel.ops.model import Case, Implementation, Op
from ejkernel.ops.refusal_names import name_public_argument
from ejkernel_conformance import claims, running
from ejkernel_conformance.subjects import Subject, abstract_args, abstract_record, pinned_plan


def check_refusals(implementation: Implementation, cases: claims.Cases) -> None:
    """Checks that dispatch serves a case on this device, or refuses it with the reasons that the device and the record
    give.

    Calls that are refused on this device are made, one per set of reasons: they raise with the table of reasons.
    """
    device_reasons = hardware_refusals(implementation, current_device())
    raised: set[tuple[str, ...]] = set()
    for op, case in cases:
        record = abstract_record(op, case)
        refused = claims.record_refusals(op, implementation, record)
        expected = (*device_reasons, *(name_public_argument(op, reason) for reason in refused))
        reasons = _reasons(op, implementation, record)
        if reasons != expected:
            raise AssertionError(f"{implementation.name} on {op.name}, {case.name}: got {reasons}, wants {expected}")
        if not all(reason.strip() for reason in reasons):
            raise AssertionError(f"{implementation.name} on {op.name}, {case.name}: an empty reason in {reasons}")
        if reasons and reasons not in raised:
            raised.add(reasons)
            _check_raises(op, implementation, case, reasons)


def _reasons(op: Op, implementation: Implementation, record: Any) -> tuple[str, ...]:
    choice = pinned_plan(op, implementation).choose_implementation(record, "forward")
    # By name: the plugins may have been loaded again since the tests were collected.
    return next(v.reasons for v in choice.verdicts if v.implementation.name == implementation.name)


def _check_raises(op: Op, implementation: Implementation, case: Case, reasons: tuple[str, ...]) -> None:
    """Checks that a call of a refused case raises NoImplementationError with all reasons before any computation."""
    subject = Subject(op=op, implementation=implementation, case=case)
    plan = pinned_plan(op, implementation)
    try:
        jax.eval_shape(lambda args: running.call(plan, args), abstract_args(case))
    except NoImplementationError as error:
        if missing := [reason for reason in reasons if reason not in str(error)]:
            raise AssertionError(f"{subject}: the error of a refused call lacks {missing}") from error
        return
    raise AssertionError(f"{subject} is refused ({'; '.join(reasons)}), and a call of it runs")
