"""Ring attention in Mosaic GPU: what it serves, what it refuses by name, and that it lowers for CUDA."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from ejkernel.modules import ring_attention
from ejkernel.ops import explain
from ejkernel.ops.device import DeviceInfo, target_device
from ejkernel.types import MaskInfo

H200 = DeviceInfo(platform="gpu", vendor="nvidia", kind="NVIDIA H200", compute_capability=9.0)
QUERY, KEY = (jax.ShapeDtypeStruct((1, 1024, heads, 128), jnp.bfloat16) for heads in (4, 2))
PART = P(None, "sp")
IDS = MaskInfo.from_segments(jnp.zeros((1, 1024), jnp.int32))
SINKS = jax.ShapeDtypeStruct((4, 1), jnp.float32)


def placed(size):
    mesh = jax.make_mesh((size,), ("sp",), (AxisType.Auto,), devices=jax.devices()[:size])
    return {"mesh": mesh, "in_specs": (PART,) * 3, "out_specs": PART, "axis_name": "sp"}


def verdict(*arrays, **options):
    with target_device(H200):
        decision = explain(ring_attention, *arrays, **placed(4), **options)
    return [
        next(v for v in choice.verdicts if v.implementation.name == "mosaic_gpu")
        for choice in (
            decision.forward,
            decision.backward,
        )
    ]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"causal": True},
        {"causal": True, "mask_info": IDS, "logits_soft_cap": 30.0, "softmax_aux": SINKS},
        {"sliding_window": (300, 20)},
    ],
    ids=["full", "causal", "packed, capped, sinks", "window"],
)
def test_ring_calls_that_the_step_kernel_supports_are_served(options):
    for one in verdict(QUERY, KEY, KEY, **options):
        assert one.status == "chosen", one.reasons


def test_calls_whose_steps_need_positions_are_refused():
    longer = jax.ShapeDtypeStruct((1, 2048, 2, 128), jnp.bfloat16)
    for one in verdict(QUERY, longer, longer, causal=True):
        assert "q_positions is not handled, which the steps of this ring need" in one.reasons


def test_a_mask_is_refused_by_name():
    mask = MaskInfo(_attention_mask=jnp.ones((1, 1, 1024, 1024), bool))
    for one in verdict(QUERY, KEY, KEY, mask_info=mask):
        assert one.reasons == ("mask is not handled",)


@pytest.mark.parametrize(("size", "kernels"), [(2, 2), (4, 3)])
def test_both_passes_lower_for_every_ring_size(size, kernels):
    """A kernel for the own step, one for the last and, from three devices on, one in the loop between them."""
    call = functools.partial(ring_attention, causal=True, **placed(size))

    def loss(*arrays):
        return jnp.sum(call(*arrays).astype(jnp.float32))

    with target_device(H200):
        traced = jax.jit(jax.grad(loss, (0, 1, 2))).trace(QUERY, KEY, KEY)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("@mosaic_gpu") == 2 * kernels
    assert "collective_permute" in text
    assert "all_gather" not in text
