"""Whether an implementation does what it says it can do, and whether that was tested at all."""

import dataclasses
import functools
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import jax
from jax import lax

from ejkernel.ops.device import current_device
from ejkernel.ops.dispatch import refusals
from ejkernel.ops.model import Case, Implementation, Op
from ejkernel.ops.params import Direction
from ejkernel.ops.plugins import registry
from ejkernel.types.arguments import array_fields, non_default_fields, optional_fields
from ejkernel.types.pullback import ForwardResults, Pullback
from ejkernel_conformance import running
from ejkernel_conformance.compare import assert_same_shapes, close
from ejkernel_conformance.shards import abstract_last_shard, last_shard
from ejkernel_conformance.subjects import NONE, abstract_args, abstract_record, lowered, tolerance

LSE_COTANGENT = "lse_cotangent"
"""The names that `Requires.handles` may have in addition to record fields: a field of the `Pullback`."""
Cases = Iterable[tuple[Op, Case]]
"""Cases of the operations that an implementation is registered for."""
_answered: defaultdict[tuple[Op, Case], set[str]] = defaultdict(set)
"""The fields that `matters` has dropped from a case in this process."""


def check_serves_some_case(implementation: Implementation, cases: Cases) -> None:
    """Checks that an implementation serves at least one case on a device it is made for. An implementation that refuses
    every case would pass every other test.
    """
    lines: list[str] = []
    for op, case in cases:
        reasons = record_refusals(op, implementation, abstract_record(op, case))
        if not reasons:
            return
        lines.append(f"  {op.name}, {case.name}: {'; '.join(reasons)}")
    raise AssertionError("\n".join([f"{implementation.name} serves no case of {implementation.family}", *lines]))


def check_claim(implementation: Implementation, name: str, cases: Cases) -> None:
    """Checks that some served case passes the named argument and has another result without it.

    That it honours the cotangent of lse is shown by the gradients of a case that returns lse. The case's other tests
    then show that the implementation honours the argument. `lax.Precision` arguments are advice on rounding, which the
    reference always does best: for them, being given is enough.
    """
    if name == LSE_COTANGENT:
        shown = any(_returns_lse(op, implementation, case) for op, case in cases)
    else:
        ordered = sorted(cases, key=lambda each: _work_left(*each, name))
        shown = any(_serves_evidence(*each, implementation, name) and matters(*each, name) for each in ordered)
    if shown:
        return
    raise AssertionError(
        f"{implementation.name} claims to handle {name}, and no case of {implementation.family} that it serves has "
        f"another answer without it: the claim is untested"
    )


def _serves_evidence(op: Op, case: Case, implementation: Implementation, name: str) -> bool:
    """Returns whether a case has a record in which the field matters, and the implementation serves that record."""
    return any(not record_refusals(op, implementation, record) for record in evidence(op, case, name))


def _work_left(op: Op, case: Case, name: str) -> int:
    """Returns how many answers of the reference `matters` has to compute: of the case, and of it without the field."""
    return ((op, case) not in _answered) + (name not in _answered.get((op, case), ()))


def _returns_lse(op: Op, implementation: Implementation, case: Case) -> bool:
    """Returns whether a call returns lse and is differentiated by the implementation: the case's gradients show the
    claim.
    """
    record = abstract_record(op, case)
    grad_fields = claimed_gradients(implementation, record)
    refused = record_refusals(op, implementation, record, "backward", grad_fields)
    return op.returns_residual_lse(abstract_args(case)) and not refused


def check_sharding_fields(op: Op, implementation: Implementation, case: Case) -> None:
    """Checks that every implementation that serves the whole call handles the record fields that only sharding sets.

    Such a field is no argument of any operation: a refusal of it would leave the call served on one device and refused,
    or served by another kernel, on two.
    """
    record = abstract_record(op, case)
    added = set(non_default_fields(_abstract_shard(op, case))) - set(non_default_fields(record))
    unclaimed = sorted((added & sharding_fields(op.family.name)) - implementation.requires.handles)
    if unclaimed:
        raise AssertionError(
            f"{implementation.name} serves {op.name} on {case.name} and does not handle {', '.join(unclaimed)}, which "
            f"shards of that call have"
        )


@functools.cache
def sharding_fields(family: str) -> frozenset[str]:
    """Returns the fields of a family's record that shards of some case have and that no case gives."""
    cases = [(op, case) for op in registry().ops.values() if op.family.name == family for case in op.cases]
    given = {name for op, case in cases for name in non_default_fields(abstract_record(op, case))}
    shards = (_abstract_shard(op, case) for op, case in cases)
    return frozenset(name for shard in shards for name in non_default_fields(shard)) - given


def check_gradient_claim(op: Op, implementation: Implementation, name: str, case: Case) -> None:
    """Checks that the implementation computes the gradient of the named field for a case from `gradient_case`, in the
    field's shape and dtype.
    """
    record = abstract_record(op, case)
    gradients = _gradients(op, implementation, record, claimed_gradients(implementation, record))
    got = {field: x for field, x in gradients.items() if field == name}
    assert_same_shapes(got, {name: getattr(record, name)}, f"{implementation.name} on {case.name}, gradients")


def gradient_case(implementation: Implementation, name: str, cases: Cases) -> tuple[Op, Case]:
    """Returns a case in which an implementation says it gives the gradient of a field, with its operation.

    Raises:
        AssertionError: There is none, or it cannot be meant.
    """
    if implementation.backward is None:
        raise AssertionError(f"{implementation.name} claims a gradient of {name} and has no backward")
    for op, case in cases:
        if name not in op.family.differentiable:
            raise AssertionError(f"{implementation.name} claims a gradient of {name}, which {op.family.name} has not")
        record = abstract_record(op, case)
        grad_fields = claimed_gradients(implementation, record)
        if name in grad_fields and not record_refusals(op, implementation, record, "backward", grad_fields):
            return op, case
    family = implementation.family
    raise AssertionError(f"{implementation.name} claims a gradient of {name}, and serves no case of {family} with it")


def claimed_gradients(implementation: Implementation, record: Any) -> frozenset[str]:
    """Returns the fields of a record that an implementation says it gives gradients of."""
    return implementation.gradients & array_fields(record).keys()


def _gradients(op: Op, implementation: Implementation, record: Any, grad_fields: frozenset[str]) -> dict[str, Any]:
    part = implementation.config.heuristic(record, current_device(), "both" if implementation.paired else "backward")

    def run(record: Any) -> dict[str, Any]:
        # A paired backward function follows its own forward function only.
        forward = implementation.function("forward")(record, part) if implementation.paired else None
        made = ForwardResults(*(op.family.reference(record) if forward is None else forward))
        pullback = Pullback(record=record, cotangent=made.output, grad_fields=grad_fields, **made._asdict())
        return implementation.function("backward")(pullback, part)

    return jax.eval_shape(run, record)


def record_refusals(
    op: Op,
    implementation: Implementation,
    record: Any,
    direction: Direction = "forward",
    grad_fields: frozenset[str] = NONE,
) -> tuple[str, ...]:
    """Returns what dispatch has against a record, on a machine with all that the implementation needs."""
    device = current_device()
    needs = implementation.requires_for(direction)
    content = dataclasses.replace(needs, devices=device.names, modules=(), min_compute_capability=None)
    anywhere = dataclasses.replace(implementation, requires=content, backward_requires=None)
    return tuple(refusals(op.family, anywhere, record, device, "auto", direction, grad_fields))


def evidence(op: Op, case: Case, name: str) -> Iterable[Any]:
    """Returns the record of a case in which a field matters, if there is one: the case's own, or that
    of a shard of it.
    """
    record = abstract_record(op, case)
    if name in non_default_fields(record):
        return (record,) if name in case.exercises else ()
    shard = _abstract_shard(op, case)
    return (shard,) if name in non_default_fields(shard) else ()


@functools.cache
def _abstract_shard(op: Op, case: Case) -> Any:
    """Returns the shapes of the last shard of a case's record."""
    return abstract_last_shard(op.family, abstract_record(op, case))


@functools.cache
def matters(op: Op, case: Case, name: str) -> bool:
    """Returns whether the reference's answer changes when a field is dropped, on the record that `evidence` is about.

    If the reference raises for the record without the field, the answer counts as changed.
    """
    _answered[op, case].add(name)
    record = lowered(op, case)
    given = name in non_default_fields(record)
    record = record if given else last_shard(op.family, record)
    if isinstance(getattr(record, name), lax.Precision):
        return True
    without = dataclasses.replace(record, **{name: optional_fields(record)[name]})
    # A case gives several fields, and each is dropped from the same answer.
    answer = running.family_answer(op, case)[0] if given else _answer(op, record)
    try:
        other = _answer(op, without)
    except (TypeError, ValueError):
        # The remaining arguments may be no valid call. For example, the number of state slots equals the number of
        # sequences only by chance.
        return True
    return not close(answer, other, tolerance(op, record))


def _answer(op: Op, record: Any) -> Any:
    return jax.jit(lambda record: op.family.reference(record)[0])(record)
