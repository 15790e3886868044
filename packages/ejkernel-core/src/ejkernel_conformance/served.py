"""Selects the tests that can run on this device: tests whose calls dispatch refuses are not collected.

A test function says with a decorator what has to be served for it. The plugin asks before it makes the test, so that a
run ends with passed and failed tests only. What is refused is checked by `refusals.check_refusals`, as data.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, TypeVar, final

from ejkernel.ops.device import current_device
from ejkernel.ops.dispatch import hardware_refusals
from ejkernel.ops.params import Direction
from ejkernel_conformance import claims, row_states, shards
from ejkernel_conformance.subjects import Subject, abstract_record, refusal

Test = TypeVar("Test", bound=Callable[..., None])
Refusal = Callable[[Any], str]
"""The parameter of a test -> why dispatch refuses what the test runs, in its words; empty where it serves."""
ATTRIBUTE = "ejk_refusal"


def unless(refusal: Refusal) -> Callable[[Test], Test]:
    """Decorates a test that is collected only for parameters that are not refused."""

    def decorate(test: Test) -> Test:
        setattr(test, ATTRIBUTE, refusal)
        return test

    return decorate


def refusal_of(test: Callable[..., None]) -> Refusal:
    """Returns what a test function is decorated with; without a decorator it always runs."""
    return getattr(test, ATTRIBUTE, _never)


@final
@dataclasses.dataclass(frozen=True)
class Refused:
    """Why dispatch does not let a subject run in all of some directions."""

    directions: tuple[Direction, ...]

    def __call__(self, subject: Subject) -> str:
        """Returns the reasons of the first direction that is refused."""
        return next(filter(None, (_refusal(subject, direction) for direction in self.directions)), "")


def refused(*directions: Direction) -> Refused:
    """Returns why dispatch does not let a subject run in all of some directions."""
    return Refused(directions)


@functools.cache
def _refusal(subject: Subject, direction: Direction) -> str:
    """Returns the reasons to refuse a subject. They are computed once for all tests of the subject."""
    return refusal(subject, direction)


def last_shard_refused(subject: Subject) -> str:
    """Returns why dispatch does not let a subject run on a whole call, or on its last shard."""
    if reason := _refusal(subject, "forward"):
        return reason
    whole = abstract_record(subject.op, subject.case)
    return refusal(subject, "forward", record=shards.abstract_last_shard(subject.op.family, whole))


def row_states_refused(subject: Subject) -> str:
    """Returns why no summary of a subject's tokens has states of rows that its implementation computes."""
    if reason := _refusal(subject, "forward"):
        return reason
    return "" if row_states.serves_some_summary(subject) else "row_states: returns None for the rows of this call"


def candidates_refused(tunable: Any) -> str:
    """Returns why dispatch does not let a kernel run whose candidates are tried."""
    directions: tuple[Direction, ...] = ("forward",) if tunable.direction == "forward" else ("forward", "backward")
    return Refused(directions)(tunable.subject)


def hardware_refused(target: Any) -> str:
    """Returns why no case of an implementation runs on this device."""
    return "; ".join(hardware_refusals(target.implementation, current_device()))


def claimed_gradient_refused(target: Any) -> str:
    """Returns why the backward pass with a claimed gradient does not run here. A claim that no case shows does: it
    fails.
    """
    try:
        op, case = claims.gradient_case(target.implementation, target.name, target.cases)
    except AssertionError:
        return ""
    subject = Subject(op=op, implementation=target.implementation, case=case)
    grad_fields = claims.claimed_gradients(target.implementation, abstract_record(op, case))
    return refusal(subject, "backward", grad_fields=grad_fields)


def _never(parameter: Any) -> str:
    return ""
