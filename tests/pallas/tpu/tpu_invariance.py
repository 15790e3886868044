"""Checks that the suite finds TPU kernels whose rows depend on the rest of the call."""

import dataclasses

import pytest
from tpu_paged_records import lowered

from ejkernel.ops.model import Case
from ejkernel.ops.plugins import registry
from ejkernel_conformance import invariance
from ejkernel_conformance.selection import FamilyTarget


def assert_finds_products_that_follow(size_of, claim, implementation, call, output, monkeypatch):
    """Products have 512 keys, and 128 where `size_of` a record is another than in the whole call.

    Args:
        size_of: Record -> the size that the claim is about.
        claim: The name of the claim.
        implementation: The name of the implementation.
        call: Operation, (key, sizes) -> arguments, and sizes.
        output: (record, keys per product) -> outputs.
        monkeypatch: The fixture.
    """
    operation, make_arrays, sizes = call
    op = registry().op(operation)
    kernel = next(i for i in registry().implementations[operation] if i.name == implementation)
    on_cpu = dataclasses.replace(kernel.requires, devices=frozenset({"cpu", "tpu"}))
    case = Case(name="changed", make=lambda key: op.arguments(**make_arrays(key, sizes)))
    whole = size_of(lowered(operation, make_arrays, sizes))
    monkeypatch.setattr(
        invariance, "_compiled", lambda *_: lambda record: output(record, 512 if size_of(record) == whole else 128)
    )
    target = FamilyTarget(dataclasses.replace(kernel, requires=on_cpu), ((op, case),), claim)
    with pytest.raises(AssertionError, match=rf"{claim}, .* of the same rows differ"):
        invariance.check_invariance(target)
