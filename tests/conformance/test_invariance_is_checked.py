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


FAULTS = {
    "splits that vary with the batch": (
        "page_attention",
        lambda case: "ci" in case.tags,
        lambda record, fault: {
            "block_q": 1,
            "block_kv": 16 if fault and record.kv_lens.shape[0] == 1 else 8,
            "stack": 1,
            "batch_invariant": True,
        },
        "batch, the last sequence alone: ",
    ),
    "blocks of keys that vary with the chunk": (
        "flash_attention",
        lambda case: case.name == "causal",
        lambda record, fault: {
            "block_q": 32,
            "block_kv": 64 if fault and record.query.shape[1] <= 100 else 32,
            "batch_invariant": True,
        },
        "chunking, a chunk: ",
    ),
    "blocks of keys that begin with the row": (
        "flash_attention",
        lambda case: case.name == "segments with padding",
        lambda record, fault: {"block_q": 32, "block_kv": 32, "batch_invariant": not fault},
        "packing, .* ",
    ),
}
"""Operation, which case, the fields of XLA's configuration with and without the fault, and what the check says."""


@pytest.mark.parametrize("name", FAULTS)
def test_blocks_of_keys_that_depend_on_the_call_are_found(name, monkeypatch):
    """The same kernel with fixed blocks passes; the others change rows' bits."""
    operation, is_case, fields_of, message = FAULTS[name]
    op = registry().op(operation)
    implementation = next(i for i in registry().implementations[operation] if i.name == "xla")
    target = FamilyTarget(implementation, ((op, next(filter(is_case, op.cases))),), message.split(",")[0])
    forward, tiles = implementation.function("forward"), implementation.config.forward

    def compiled_with(fault):
        def compiled(op, implementation):
            run = jax.jit(lambda record: forward(record, tiles(**fields_of(record, fault)))[0])
            return lambda record: [np.asarray(x) for x in jax.tree.leaves(run(record))]

        return compiled

    monkeypatch.setattr(invariance, "_compiled", compiled_with(False))
    invariance.check_invariance(target)
    monkeypatch.setattr(invariance, "_compiled", compiled_with(True))
    with pytest.raises(AssertionError, match=rf"{message}.*of the same rows differ"):
        invariance.check_invariance(target)


def test_rows_outside_of_kernels_that_change_with_the_batch_are_found(monkeypatch):
    """Records are equal, but what an operation computes around the kernel depends on the number of rows."""
    op = registry().op("expert_routing")
    implementation = next(i for i in registry().implementations[op.name] if i.name == "xla")
    cases = tuple((op, case) for case in op.cases if case.name == "eight of forty")
    target = FamilyTarget(implementation, cases, "batch")

    def compiled(op, implementation):
        plan = pinned_plan(op, implementation)

        def run(args):
            *outputs, weights = op.finish(args, differentiable_call(plan, op.lower(args)))
            return [*map(np.asarray, outputs), np.asarray(weights * (1 + args.logits.shape[0] / 64))]

        return run

    monkeypatch.setattr(invariance, "_compiled_call", compiled)
    with pytest.raises(AssertionError, match=r"many experts, the call, batch, .* of the same rows differ"):
        invariance.check_invariance(target)
