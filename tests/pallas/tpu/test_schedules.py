"""What libtpu's compiler makes of attention with the tiles that a chip gets by default: registers and memory."""

import os
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec
from suite.chips import EVERY_CHIP_VARIABLE, pair_cases_with_chips

from ejkernel.modules import flash_attention, ragged_page_attention_v2, ring_attention
from ejkernel_pallas.tpu.mosaic.launch import DEFAULT_VMEM_LIMIT_BYTES
from ejkernel_pallas.tpu.profile import CHIPS, Case, Workload, profile_many

pytestmark = [pytest.mark.needs("libtpu"), pytest.mark.timeout(600)]

KINDS = ("causal", "full")
KERNELS = ("forward", "queries", "keys")
SPILLED = {
    ("v6e", "causal", "forward"): 1432,
    ("v6e", "causal", "queries"): 160,
    ("v7x", "causal", "forward"): 296,
    ("v7x", "full", "queries"): 320,
}
"""Registers that a whole run spills, of some 50 to 200 thousand bundles; all other kernels spill none."""
RINGS = KINDS if os.environ.get(EVERY_CHIP_VARIABLE) == "1" else ("full",)
"""Causal rings take the compiler four times as long as full ones, whose backward pass has the same tiles."""


def workload(causal):
    def gradients(query, key, value):
        def total(*arrays):
            return flash_attention(*arrays, causal=causal, platform="pallas").astype(jnp.float32).sum()

        return jax.grad(total, (0, 1, 2))(query, key, value)

    array = jax.ShapeDtypeStruct((1, 4096, 2, 128), jnp.bfloat16)
    return Workload(function=gradients, args=(array, array, array))


@pytest.mark.parametrize(("kind", "target"), pair_cases_with_chips(KINDS, CHIPS))
def test_attention_kernels_spill_nothing_and_fit_vmem(kind, target):
    case = Case(label=kind, build=f"{__file__}:workload", kwargs={"causal": kind == "causal"})
    (report,) = profile_many([case], target=target)
    assert report.error is None
    spilled = {}
    for kernel in report.kernels:
        (name,) = (name for name in KERNELS if name in kernel.name)
        assert kernel.vmem_bytes < min(DEFAULT_VMEM_LIMIT_BYTES, CHIPS[target].vmem)
        assert not any(loop.spills for loop in kernel.loops if loop.depth > 1), kernel.name
        spilled[name] = kernel.spills
    assert spilled == {name: SPILLED.get((target, kind, name), 0) for name in KERNELS}


def pages(queries, score_mod=None):
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

    def function(*args):
        return ragged_page_attention_v2(*args, score_mod=score_mod, platform="pallas")

    return Workload(function=function, args=args)


@pytest.mark.parametrize(("queries", "target"), pair_cases_with_chips((1, 512), CHIPS))
def test_paged_attention_spills_nothing(queries, target):
    case = Case(label="pages", build=f"{__file__}:pages", kwargs={"queries": queries})
    (report,) = profile_many([case], target=target)
    assert report.error is None
    (kernel,) = report.kernels
    assert kernel.spills == kernel.fills == 0


def pages_with_slopes():
    """The prefill of `pages` with a slope per head by `score_mod`."""
    slopes = jnp.exp2(-8.0 * (jnp.arange(32) + 1) / 32)
    return pages(512, lambda s, b, h, q, k: s + slopes[h] * (k - q))


def test_functions_over_pages_spill_nothing():
    (report,) = profile_many([Case(label="slopes", build=f"{__file__}:pages_with_slopes", kwargs={})], target="v5e")
    assert report.error is None
    (kernel,) = report.kernels
    assert kernel.spills == kernel.fills == 0


def ring(causal):
    """Gradients of attention over a ring of 8 devices, 4096 tokens each."""
    spec = PartitionSpec(None, "sp")
    placed: dict[str, Any] = {"in_specs": (spec,) * 3, "out_specs": spec, "axis_name": "sp"}

    def gradients(*arrays):
        def total(arrays):
            mesh: Any = jax.sharding.get_abstract_mesh()
            output = ring_attention(*arrays, causal=causal, mesh=mesh, platform="pallas", **placed)
            return output.astype(jnp.float32).sum()

        return jax.grad(total)(arrays)

    array = jax.ShapeDtypeStruct((1, 4096 * 8, 2, 128), jnp.bfloat16)
    return Workload(function=gradients, args=(array,) * 3, mesh_axes={"sp": 8}, partition_specs=(spec,) * 3)


@pytest.mark.parametrize("kind", RINGS)
def test_backward_ring_kernels_spill_nothing(kind):
    case = Case(label="ring", build=f"{__file__}:ring", kwargs={"causal": kind == "causal"})
    (report,) = profile_many([case], target="v7x")
    assert report.error is None
    (kernel,) = (kernel for kernel in report.kernels if "backward" in kernel.name)
    assert kernel.spills == 0
