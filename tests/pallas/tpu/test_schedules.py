"""What libtpu's compiler makes of attention with the tiles that a chip gets by default: registers and memory."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from ejkernel.modules import flash_attention, ragged_page_attention_v2, ring_attention
from ejkernel_pallas.tpu.mosaic.launch import DEFAULT_VMEM_LIMIT_BYTES
from ejkernel_pallas.tpu.profile import CHIPS, Case, Workload, profile_many

pytestmark = [pytest.mark.needs("libtpu"), pytest.mark.timeout(600)]

KINDS = {"v5e": ("causal", "full"), "v5p": ("causal",), "v6e": ("causal", "full"), "v7x": ("causal",)}
"""Full attention once for each width of matrix units: the compiler is the same for both chips."""
KERNELS = ("forward", "queries", "keys")
SPILLED = {
    ("v6e", "causal", "forward"): 1432,
    ("v6e", "causal", "queries"): 160,
    ("v7x", "causal", "forward"): 296,
}
"""Registers that a whole run spills, of some 50 to 200 thousand bundles; all other kernels spill none."""


def workload(causal):
    def gradients(query, key, value):
        def total(*arrays):
            return flash_attention(*arrays, causal=causal, platform="pallas").astype(jnp.float32).sum()

        return jax.grad(total, (0, 1, 2))(query, key, value)

    array = jax.ShapeDtypeStruct((1, 4096, 2, 128), jnp.bfloat16)
    return Workload(function=gradients, args=(array, array, array))


@pytest.mark.parametrize("target", CHIPS)
def test_spills_and_memory(target):
    build = f"{__file__}:workload"
    cases = [Case(label=kind, build=build, kwargs={"causal": kind == "causal"}) for kind in KINDS[target]]
    spilled = {}
    for report in profile_many(cases, target=target):
        assert report.error is None
        for kernel in report.kernels:
            (name,) = (name for name in KERNELS if name in kernel.name)
            assert kernel.vmem_bytes < min(DEFAULT_VMEM_LIMIT_BYTES, CHIPS[target].vmem)
            assert not any(loop.spills for loop in kernel.loops if loop.depth > 1), kernel.name
            spilled[target, report.label, name] = kernel.spills
    assert len(spilled) == len(cases) * len(KERNELS)
    assert {at: count for at, count in spilled.items() if count} == {
        at: count for at, count in SPILLED.items() if at[0] == target
    }


def pages(queries):
    """16 sequences of 2048 tokens, of which `queries` are new."""
    table = np.random.default_rng(0).permutation(16 * 128).astype(np.int32).reshape(16, 128)
    args = (
        jax.ShapeDtypeStruct((16 * queries, 32, 128), jnp.bfloat16),
        jax.ShapeDtypeStruct((16 * 128, 16, 16, 128), jnp.bfloat16),
        np.full(16, 2048, np.int32),
        table,
        (np.arange(17) * queries).astype(np.int32),
        np.array([16], np.int32),
    )
    return Workload(function=lambda *args: ragged_page_attention_v2(*args, platform="pallas"), args=args)


@pytest.mark.parametrize("target", CHIPS)
def test_paged_attention_spills_nothing(target):
    cases = [Case(label=str(n), build=f"{__file__}:pages", kwargs={"queries": n}) for n in (1, 512)]
    reports = profile_many(cases, target=target)
    assert [report.label for report in reports] == ["1", "512"]
    for report in reports:
        assert report.error is None
        (kernel,) = report.kernels
        assert kernel.spills == kernel.fills == 0, report.label


def ring():
    """Gradients of causal attention over a ring of 8 devices, 4096 tokens each."""
    spec = PartitionSpec(None, "sp")
    spread: dict[str, Any] = {"in_specs": (spec,) * 3, "out_specs": spec, "axis_name": "sp"}

    def gradients(*arrays):
        def total(arrays):
            mesh: Any = jax.sharding.get_abstract_mesh()
            output = ring_attention(*arrays, causal=True, mesh=mesh, platform="pallas", **spread)
            return output.astype(jnp.float32).sum()

        return jax.grad(total)(arrays)

    array = jax.ShapeDtypeStruct((1, 4096 * 8, 2, 128), jnp.bfloat16)
    return Workload(function=gradients, args=(array,) * 3, axes={"sp": 8}, specs=(spec,) * 3)


def test_a_ring_spills_nothing_backward_where_tiled_attentions_rule_does():
    (report,) = profile_many([Case(label="ring", build=f"{__file__}:ring")], target="v7x")
    assert report.error is None
    (kernel,) = (kernel for kernel in report.kernels if "backward" in kernel.name)
    assert kernel.spills == 0
