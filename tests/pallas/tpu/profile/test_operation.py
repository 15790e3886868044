"""A call of an operation as a workload."""

import jax
import numpy as np
import pytest

from ejkernel.ops import registry
from ejkernel_pallas.tpu.profile.operation import make_profile_case

OP = registry().op("flash_attention")


def made(name: str, gradient: bool):
    record = next(case for case in OP.cases if case.name == name).make(jax.random.key(0))
    return record, make_profile_case(name, OP.name, record, "xla", gradient, 1e9)


@pytest.mark.parametrize("name", ["causal", "segments with padding"])
def test_a_case_keeps_values_of_integer_arrays_only(name):
    record, case = made(name, False)
    given, kept = jax.tree.leaves(record), jax.tree.leaves(case.workload().args)
    for before, after in zip(given, kept, strict=True):
        assert (after.shape, after.dtype) == (before.shape, before.dtype)
        if np.issubdtype(after.dtype, np.floating):
            assert isinstance(after, jax.ShapeDtypeStruct)
        else:
            np.testing.assert_array_equal(after, before)


@pytest.mark.parametrize("name", ["causal", "segments with padding"])
def test_the_workload_computes_the_call(name):
    record, case = made(name, False)
    workload = case.workload()
    assert workload.flops == 1e9
    got = jax.jit(workload.function)(record)
    np.testing.assert_allclose(got, OP.reference(record), rtol=1e-4, atol=1e-4)


def test_the_workload_computes_gradients_of_all_floating_arrays():
    record, case = made("causal", True)
    output, gradients = jax.jit(case.workload().function)(record)
    wanted = jax.grad(lambda arrays: OP.reference(arrays).sum())(record)
    np.testing.assert_allclose(output, OP.reference(record), rtol=1e-4, atol=1e-4)
    for got, want in zip(gradients, jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-3, atol=1e-3)
