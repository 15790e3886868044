"""What the check of requests needs: families that say which request owns an entry, and finding planted leaks."""

import dataclasses

import jax
import numpy as np
import pytest

from ejkernel.ops.plugins import registry
from ejkernel_conformance import requests, running
from ejkernel_conformance.subjects import Subject, lowered


def subject(operation, case):
    """The XLA implementation on a case."""
    found = registry()
    op = found.ops[operation]
    (implementation,) = [x for x in found.implementations[operation] if x.name == "xla"]
    return Subject(op=op, implementation=implementation, case=next(x for x in op.cases if x.name == case))


@pytest.mark.whole
@pytest.mark.parametrize("family", sorted({op.family.name for op in registry().ops.values()}))
def test_some_case_of_every_family_has_several_requests(family):
    found = [op for op in registry().ops.values() if op.family.name == family]
    cases = ((op, case) for op in found for case in op.cases if "ci" in case.tags)
    records = ((op, requests.with_padding(lowered(op, case))) for op, case in cases)
    assert any(next(requests.poisons(op.family, record), None) for op, record in records)


@pytest.mark.parametrize("leak", [lambda x: 0 * x.sum(), lambda x: 1e-30 * x[0, 0, 0]], ids=["NaN", "huge"])
def test_a_leak_is_found(leak, monkeypatch):
    packed, honest = subject("causal_conv1d", "packed"), running.on_records

    def leaking(subject, isolates=False):
        def run(record):
            output, state = honest(subject, isolates)(record)
            return output + leak(record.x), state

        return jax.jit(run)

    requests.check_requests(packed)
    monkeypatch.setattr(running, "on_records", leaking)
    with pytest.raises(
        AssertionError, match=r"causal_conv1d-xla-packed, output.0: \d+ of \d+ entries of other requests"
    ):
        requests.check_requests(packed)


def test_padding_that_is_not_0_is_found(monkeypatch):
    packed, honest = subject("causal_conv1d", "packed"), running.on_records
    monkeypatch.setattr(
        running, "on_records", lambda subject, isolates: lambda record: _with_last(honest(subject, isolates)(record))
    )
    with pytest.raises(AssertionError, match="padding is not 0"):
        requests.check_requests(packed)


def _with_last(results):
    output, state = results
    return np.concatenate([output[:, :-1], np.ones_like(output[:, -1:])], axis=1), state


def test_a_family_without_a_description_has_the_rows_of_its_batch():
    op = registry().ops["gated_linear_attention"]
    record = lowered(op, next(case for case in op.cases if "ci" in case.tags))
    family = dataclasses.replace(op.family, requests=None)
    (owners,) = requests.owners_of(family, record)
    assert np.array_equal(owners["query"].ravel(), np.arange(record.query.shape[0]))
    assert np.array_equal(owners["output.0"].ravel(), np.arange(record.query.shape[0]))
