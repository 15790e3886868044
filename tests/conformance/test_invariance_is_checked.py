"""The check of batch invariance fails for programs that are not invariant, and for claims that no case shows."""

import dataclasses

import jax
import numpy as np
import pytest

from ejkernel.ops.grad import differentiable_call
from ejkernel.ops.plugins import registry
from ejkernel_conformance import invariance
from ejkernel_conformance.selection import FamilyTarget
from ejkernel_conformance.subjects import pinned_plan


@pytest.fixture
def target():
    op = registry().op("grouped_matmul")
    implementation = next(i for i in registry().implementations[op.name] if i.name == "xla")
    case = next(case for case in op.cases if "ci" in case.tags)
    return FamilyTarget(implementation, ((op, case),), "batch")


def test_rows_that_change_with_the_batch_are_found(target, monkeypatch):
    """The output of each row also depends on how many rows there are."""

    def compiled(op, implementation):
        plan = pinned_plan(op, implementation)
        run = jax.jit(lambda record: differentiable_call(plan, record) * (1 + record.lhs.shape[0] / 64))
        return lambda record: [np.asarray(run(record))]

    invariance.check_invariance(target)
    monkeypatch.setattr(invariance, "_compiled", compiled)
    with pytest.raises(AssertionError, match=r"batch, each third row: .* of the same rows differ"):
        invariance.check_invariance(target)


def test_an_implementation_that_refuses_another_batch_is_found(target):
    """Another one would serve the last row alone, with other bits."""
    implementation = target.implementation
    requires = dataclasses.replace(
        implementation.requires, extra=lambda record: ("few rows",) if record.lhs.shape[0] < 2 else ()
    )
    picky = dataclasses.replace(implementation, requires=requires)
    with pytest.raises(AssertionError, match=r"batch, one row: it serves only the first call"):
        invariance.check_invariance(dataclasses.replace(target, implementation=picky))


def test_a_claim_that_no_case_shows_fails(target):
    with pytest.raises(AssertionError, match=r"claims to be invariant to batch, and no case shows it"):
        invariance.check_invariance(dataclasses.replace(target, cases=()))
