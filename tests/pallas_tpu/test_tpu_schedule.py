"""What libtpu's compiler makes of attention with the tiles that a chip gets by default: registers, memory, seconds."""

import jax
import jax.numpy as jnp
import pytest

from ejkernel.modules import flash_attention
from ejkernel_pallas.tpu.profile import CHIPS, Case, Workload, profile_many
from ejkernel_pallas.tpu.tiled_attention.launch import VMEM_LIMIT

pytestmark = pytest.mark.libtpu

# Spilled registers a bundle issued. Two of the chips have matrix units that are twice as fast as their results can be
# taken up: with products small enough for no spill the forward pass takes half as long again.
SPILLED = {"v5e": 0.01, "v5p": 0.01, "v6e": 0.3, "v7x": 0.3}
KERNELS = 3


def workload():
    def gradients(query, key, value):
        def total(*arrays):
            return flash_attention(*arrays, causal=True, platform="pallas").astype(jnp.float32).sum()

        return jax.grad(total, (0, 1, 2))(query, key, value)

    array = jax.ShapeDtypeStruct((1, 4096, 2, 128), jnp.bfloat16)
    return Workload(function=gradients, args=(array, array, array))


@pytest.mark.parametrize("target", CHIPS)
def test_spills_and_memory(target):
    (report,) = profile_many([Case(label="causal", build=f"{__file__}:workload")], target=target)
    assert report.error is None
    assert len(report.kernels) == KERNELS
    for kernel in report.kernels:
        assert kernel.vmem_bytes < min(VMEM_LIMIT, CHIPS[target].vmem)
        assert kernel.spills <= SPILLED[target] * kernel.simulation.bundles, kernel.name
        if target in ("v5e", "v5p") and "forward" in kernel.name:
            assert (kernel.spills, kernel.fills) == (0, 0)
