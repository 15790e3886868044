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


def test_splits_that_vary_with_the_batch_are_found(monkeypatch):
    """The same kernel with fixed tiles of keys passes; tiles that follow the number of sequences change rows' bits."""
    op = registry().op("page_attention")
    implementation = next(i for i in registry().implementations[op.name] if i.name == "xla")
    case = next(case for case in op.cases if "ci" in case.tags)
    target = FamilyTarget(implementation, ((op, case),), "batch")
    forward, tiles = implementation.function("forward"), implementation.config.forward

    def compiled_with(keys_per_tile):
        def compiled(op, implementation):
            def run(record):
                keys = keys_per_tile(record.kv_lens.shape[0])
                return forward(record, tiles(block_q=1, block_kv=keys, stack=1, batch_invariant=True))[0]

            return lambda record: [np.asarray(x) for x in jax.tree.leaves(jax.jit(run)(record))]

        return compiled

    monkeypatch.setattr(invariance, "_compiled", compiled_with(lambda sequences: 8))
    invariance.check_invariance(target)
    monkeypatch.setattr(invariance, "_compiled", compiled_with(lambda sequences: 8 if sequences > 1 else 16))
    with pytest.raises(AssertionError, match=r"the last sequence alone: .* of the same rows differ"):
        invariance.check_invariance(target)


def test_blocks_of_keys_that_begin_with_the_row_are_found(monkeypatch):
    """The same kernel with blocks that begin with segments passes."""
    op = registry().op("flash_attention")
    implementation = next(i for i in registry().implementations[op.name] if i.name == "xla")
    case = next(case for case in op.cases if case.name == "segments with padding")
    target = FamilyTarget(implementation, ((op, case),), "packing")
    forward, tiles = implementation.function("forward"), implementation.config.forward

    def compiled_with(begins_with_segments):
        def compiled(op, implementation):
            def run(record):
                return forward(record, tiles(block_q=32, block_kv=32, batch_invariant=begins_with_segments))[0]

            return lambda record: [np.asarray(x) for x in jax.tree.leaves(jax.jit(run)(record))]

        return compiled

    monkeypatch.setattr(invariance, "_compiled", compiled_with(True))
    invariance.check_invariance(target)
    monkeypatch.setattr(invariance, "_compiled", compiled_with(False))
    with pytest.raises(AssertionError, match=r"packing, .* of the same rows differ"):
        invariance.check_invariance(target)


def test_blocks_of_keys_that_vary_with_the_chunk_are_found(monkeypatch):
    """The same kernel with fixed blocks passes; blocks that follow the number of queries change rows' bits."""
    op = registry().op("flash_attention")
    implementation = next(i for i in registry().implementations[op.name] if i.name == "xla")
    case = next(case for case in op.cases if case.name == "causal")
    target = FamilyTarget(implementation, ((op, case),), "chunking")
    forward, tiles = implementation.function("forward"), implementation.config.forward

    def compiled_with(block_of):
        def compiled(op, implementation):
            def run(record):
                block = block_of(record.query.shape[1])
                return forward(record, tiles(block_q=32, block_kv=block, batch_invariant=True))[0]

            return lambda record: [np.asarray(x) for x in jax.tree.leaves(jax.jit(run)(record))]

        return compiled

    monkeypatch.setattr(invariance, "_compiled", compiled_with(lambda queries: 32))
    invariance.check_invariance(target)
    monkeypatch.setattr(invariance, "_compiled", compiled_with(lambda queries: 32 if queries > 100 else 64))
    with pytest.raises(AssertionError, match=r"chunking, a chunk: .* of the same rows differ"):
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
