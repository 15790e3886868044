"""The states of rows, which kernels compute for shards, are left to JAX where they are to be differentiated."""

from types import SimpleNamespace

import pytest

from ejkernel.ops.grad import DeviceRun


def plan(**policies):
    implementation = SimpleNamespace(name="toy", row_states="no.such.module:row_states")
    chosen = SimpleNamespace(implementation=implementation)
    policies = {"differentiable_twice": False, "forward_mode": False, **policies}
    return SimpleNamespace(choose_implementation=lambda *_: chosen, op=SimpleNamespace(name="toy"), **policies)


@pytest.mark.parametrize("policy", ["differentiable_twice", "forward_mode"])
def test_no_kernel_computes_states_of_rows_that_are_differentiated(policy):
    assert DeviceRun(plan(**{policy: True})).row_states(None, None, None) is None
    with pytest.raises(ModuleNotFoundError):
        DeviceRun(plan()).row_states(None, None, None)
