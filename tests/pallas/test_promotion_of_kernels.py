"""Kernels are lowered under a caller's strict promotion: what JAX runs while it lowers a program is not the call's."""

import jax
import jax.numpy as jnp
import pytest

from ejkernel.modules import flash_attention, quantized_matmul
from ejkernel.ops.device import target_device


def shape(*sizes, dtype="bfloat16"):
    return jax.ShapeDtypeStruct(sizes, dtype)


def gradient(q, k, v):
    total = lambda q: flash_attention(q, k, v, causal=True, platform="pallas").astype(jnp.float32).sum()  # noqa: E731
    return jax.grad(total)(q)


def multiply(x, w, scales, zeros):
    return quantized_matmul(x, w, scales, zeros, transpose=True, platform="pallas")


FLASH = (gradient, (shape(1, 256, 2, 128),) * 3)
FACTORS = (shape(512, 16, dtype="float16"),) * 2
QUANTISED = (multiply, (shape(16, 1024), shape(512, 128, dtype="uint32"), *FACTORS))


@pytest.mark.parametrize(
    ("device", "platform", "call"),
    [("v6e", "tpu", FLASH), ("v6e", "tpu", QUANTISED), ("h200", "cuda", FLASH)],
    ids=["flash_attention on a TPU", "quantized_matmul on a TPU", "flash_attention on Hopper"],
)
def test_kernels_are_lowered(device, platform, call):
    function, arguments = call
    with target_device(device), jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
        lowered = jax.jit(function).trace(*arguments).lower(lowering_platforms=(platform,))
    assert "custom_call" in lowered.as_text()
