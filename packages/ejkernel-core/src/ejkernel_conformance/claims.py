"""Whether an implementation does what it says it can do, and whether that was tested at all."""

import dataclasses
import functools
from collections.abc import Iterable
from typing import Any

import jax
from jax import lax

from ejkernel.ops.arguments import array_fields, given_fields, optional_fields
from ejkernel.ops.config.params import Direction
from ejkernel.ops.device import current_device
from ejkernel.ops.dispatch import refusals
from ejkernel.ops.model import Case, Implementation, Op
from ejkernel.ops.pullback import Pullback
from ejkernel_conformance import running
from ejkernel_conformance.compare import assert_same_shapes, close
from ejkernel_conformance.shards import abstract_last_shard, last_shard
from ejkernel_conformance.subjects import NONE, abstract_record, lowered, tolerance


def check_serves_some_case(op: Op, implementation: Implementation, cases: Iterable[Case]) -> None:
    """It serves at least one case on a device it is made for: what refuses everything passes every other test."""
    verdicts = {case.name: record_refusals(op, implementation, abstract_record(op, case)) for case in cases}
    if all(verdicts.values()):
        lines = [f"  {name}: {'; '.join(reasons)}" for name, reasons in verdicts.items()]
        raise AssertionError("\n".join([f"{implementation.name} serves no case of {op.name}", *lines]))


def check_claim(op: Op, implementation: Implementation, name: str, cases: Iterable[Case]) -> None:
    """Some case that it serves gives the named argument, and would have another answer without it.

    The case's other tests then show that the implementation honours the argument. `lax.Precision` arguments are advice
    on rounding, which the reference always does best: for them, being given is enough.
    """
    for case in cases:
        for record in evidence(op, case, name):
            if not record_refusals(op, implementation, record) and matters(op, case, name):
                return
    raise AssertionError(
        f"{implementation.name} claims to handle {name}, and no case of {op.name} that it serves has another answer "
        f"without it: the claim is untested"
    )


def check_gradient_claim(op: Op, implementation: Implementation, name: str, case: Case) -> None:
    """On a case from `gradient_case`, it produces the gradient of the named field, in the field's shape and dtype."""
    record = abstract_record(op, case)
    gradients = _gradients(op, implementation, record, claimed_gradients(implementation, record))
    got = {field: x for field, x in gradients.items() if field == name}
    assert_same_shapes(got, {name: getattr(record, name)}, f"{implementation.name} on {case.name}, gradients")


def gradient_case(op: Op, implementation: Implementation, name: str, cases: Iterable[Case]) -> Case:
    """A case in which an implementation says it gives the gradient of a field.

    Raises:
        AssertionError: There is none, or it cannot be meant.
    """
    if name not in op.family.differentiable:
        raise AssertionError(f"{implementation.name} claims a gradient of {name}, which {op.family.name} does not have")
    if implementation.backward is None:
        raise AssertionError(f"{implementation.name} claims a gradient of {name} and has no backward")
    for case in cases:
        record = abstract_record(op, case)
        wanted = claimed_gradients(implementation, record)
        if name in wanted and not record_refusals(op, implementation, record, "backward", wanted):
            return case
    raise AssertionError(f"{implementation.name} claims a gradient of {name}, and serves no case of {op.name} with it")


def claimed_gradients(implementation: Implementation, record: Any) -> frozenset[str]:
    """The fields of a record that an implementation says it gives gradients of."""
    return implementation.gradients & array_fields(record).keys()


def _gradients(op: Op, implementation: Implementation, record: Any, wanted: frozenset[str]) -> dict[str, Any]:
    part = implementation.config.heuristic(record, current_device(), "backward")

    def run(record: Any) -> dict[str, Any]:
        output, residuals = op.family.reference(record)
        pullback = Pullback(record=record, residuals=residuals, output=output, cotangent=output, wanted=wanted)
        return implementation.function("backward")(pullback, part)

    return jax.eval_shape(run, record)


def record_refusals(
    op: Op, implementation: Implementation, record: Any, direction: Direction = "forward", wanted: frozenset[str] = NONE
) -> tuple[str, ...]:
    """What dispatch has against a record, on a machine with all that the implementation needs."""
    device = current_device()
    needs = implementation.requires_for(direction)
    content = dataclasses.replace(needs, devices=device.names, modules=(), min_compute_capability=None)
    anywhere = dataclasses.replace(implementation, requires=content, backward_requires=None)
    return tuple(refusals(op.family, anywhere, record, device, "auto", direction, wanted))


def evidence(op: Op, case: Case, name: str) -> Iterable[Any]:
    """The record of a case in which a field matters, if there is one: the case's own, or that of a shard of it."""
    record = abstract_record(op, case)
    if name in given_fields(record):
        return (record,) if name in case.exercises else ()
    shard = abstract_last_shard(op.family, record)
    return (shard,) if name in given_fields(shard) else ()


@functools.cache
def matters(op: Op, case: Case, name: str) -> bool:
    """Whether the reference's answer changes when a field is dropped, on the record that `evidence` is about."""
    record = lowered(op, case)
    own = name in given_fields(record)
    record = record if own else last_shard(op.family, record)
    if isinstance(getattr(record, name), lax.Precision):
        return True
    without = dataclasses.replace(record, **{name: optional_fields(record)[name]})
    # A case gives several fields, and each is dropped from the same answer.
    answer = running.family_answer(op, case)[0] if own else _answer(op, record)
    return not close(answer, _answer(op, without), tolerance(op, record))


def _answer(op: Op, record: Any) -> Any:
    return jax.jit(lambda record: op.family.reference(record)[0])(record)
