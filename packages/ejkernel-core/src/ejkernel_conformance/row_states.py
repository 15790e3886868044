"""The summaries of a shard with an implementation's `row_states`, on one device.

Devices that split the tokens of a recurrence exchange the summary of each shard: its factor on the state that enters,
the state that it adds, and in the backward pass the gradient of the state that enters. `Implementation.row_states`
computes some of these faster than a pass. A call on one device has one shard and uses no summary, so this
check computes the summaries of all tokens directly.
"""

import dataclasses
from typing import Any

import jax

from ejkernel.families.contract import Family
from ejkernel.families.split_recurrence import SplitRecurrence
from ejkernel.ops.grad import DeviceRun
from ejkernel.planning.token_shards import TokenShards
from ejkernel_conformance import running
from ejkernel_conformance.compare import assert_close, assert_gradients_close
from ejkernel_conformance.subjects import Subject, abstract_record, pinned_plan

ONE_DEVICE = TokenShards(axes=(), sizes=(), tokens=0)

Summary = dict[str, jax.Array]


@dataclasses.dataclass
class _ReferenceWithRowStates:
    """Computes records by the reference, and states of rows by the implementation under test.

    Attributes:
        subject: Implementation and case.
        num_served: How many calls for states of rows the implementation has served.
    """

    subject: Subject
    num_served: int = 0

    def __call__(self, record: Any) -> Any:
        """Returns the outputs and final states of a record."""
        return self.subject.op.family.reference(record)[0]

    def row_states(self, record: Any, output_cotangent: Any, final_states_cotangent: Any) -> jax.Array | None:
        """Returns what `Implementation.row_states` does."""
        run = DeviceRun(pinned_plan(self.subject.op, self.subject.implementation))
        result = run.row_states(record, output_cotangent, final_states_cotangent)
        self.num_served += result is not None
        return result


def can_be_summarised(family: Family, record: Any) -> bool:
    """Returns whether the record of a family has rows that devices may split: neither packed sequences nor trees."""
    functions = family.token_sharding
    if functions is None or functions.recurrence is None or getattr(record, "parents", None) is not None:
        return False
    return getattr(record, "cu_seqlens", None) is None


def serves_some_summary(subject: Subject) -> bool:
    """Returns whether the implementation serves some state of rows that the summaries of a case ask for."""
    run = _ReferenceWithRowStates(subject)
    record = abstract_record(subject.op, subject.case)
    jax.eval_shape(lambda *args: _summaries(run, subject.op.family, *args), record, _cotangents(subject, record))
    return run.num_served > 0


def check_row_states(subject: Subject) -> None:
    """Checks the factor and the state of all tokens of a call, and the gradients of the state before them."""
    family, record, run = subject.op.family, subject.record, _ReferenceWithRowStates(subject)
    cotangents = running.normal_like(_cotangents(subject, record))
    got = jax.jit(lambda *args: _summaries(run, family, *args))(record, cotangents)
    reference = running.on_cpu(lambda *args: _summaries(lambda record: family.reference(record)[0], family, *args))
    assert run.num_served, f"{subject}: row_states returned None for each call"
    want, what = reference(record, cotangents), f"{subject}, row_states"
    for name, value in want[0].items():
        assert_close(got[0][name], value, subject.tolerance, f"{what}, {name}")
    assert_gradients_close(got[1], want[1], subject.tolerance, what)


def _cotangents(subject: Subject, record: Any) -> Any:
    """Returns the shapes of the cotangents of a record's outputs and, of plain rows, its final states."""
    return jax.eval_shape(
        lambda record: subject.op.family.reference(_kernel_record(subject.op.family, record))[0], record
    )


def _kernel_record(family: Family, record: Any) -> Any:
    assert family.token_sharding is not None  # `can_be_summarised`
    return family.token_sharding.kernel_record_for_explain(record)


def _summaries(run: Any, family: Family, record: Any, cotangents: Any) -> tuple[Summary, Summary]:
    """Returns the summary of all tokens of a record, and gradients of the state that enters, computed with `run`."""
    assert family.token_sharding is not None  # `can_be_summarised`
    rule: SplitRecurrence | None = family.token_sharding.recurrence
    assert rule is not None
    record = _kernel_record(family, record)
    borders, (output, final) = rule.borders(record, ONE_DEVICE), cotangents
    factor, added = rule.summary(run, record, borders)
    gradients = {
        "the entering state, from outputs": rule.gradient(run, record, borders, output, None),
        "the entering state, from outputs and final states": rule.gradient(run, record, borders, output, final),
    }
    return {"factor": factor, "added state": added}, gradients
