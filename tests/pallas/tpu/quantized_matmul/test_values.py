"""The quantised-matmul kernels' numbers, interpreted, against the family's meaning."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tpu_races import found
from tpu_records import close, interpreted, simulated

from ejkernel.families.quantized_matmul import QuantizedMatmul, reference
from ejkernel.ops.device import DeviceInfo, target_device
from ejkernel.planning.quantized_formats import encode, make_format, pack
from ejkernel.types.pullback import Pullback
from ejkernel_pallas.tpu.quantized_matmul.backward import backward
from ejkernel_pallas.tpu.quantized_matmul.config import TpuQuantized
from ejkernel_pallas.tpu.quantized_matmul.forward import forward
from ejkernel_pallas.tpu.quantized_matmul.spec import make_spec

TILES = TpuQuantized(block_m=16, block_r=128, block_w=128)


def record(m, k, n, mode="affine", bits=None, group_size=32, transpose=False, dtype="float32", stored="float16"):
    """A record with normal inputs; the packed matrix is that of normal weights."""
    form, random = make_format(mode, bits, group_size), np.random.default_rng(5)
    weights = jnp.asarray(random.normal(size=(n, k) if transpose else (k, n)), jnp.float32)
    codes, scales, zeros, tensor_scale = encode(weights, form, stored)
    x = jnp.asarray(random.normal(size=(m, k)), dtype)
    packed = pack(codes, form.bits)
    stored = {"scales": scales, "zeros": zeros, "tensor_scale": tensor_scale}
    return QuantizedMatmul(x=x, packed=packed, format=form, transpose=transpose, **stored)


# Made when they are asked for: collecting tests must not compute anything.
CASES = {
    "int4, tiles that end beyond every axis": partial(record, 20, 150, 1056),
    "int4, transposed": partial(record, 5, 1056, 150, transpose=True, dtype="bfloat16"),
    "int4, bfloat16 scales": partial(record, 5, 130, 160, stored="bfloat16"),
    "int8": partial(record, 5, 140, 544, bits=8, dtype="bfloat16"),
    "symmetric int4, transposed": partial(record, 3, 160, 96, mode="symmetric", transpose=True, stored="bfloat16"),
    "fp8, transposed": partial(record, 3, 160, 96, mode="fp8", transpose=True, stored="float32"),
    "nf4, scales of two blocks": partial(record, 3, 130, 2304, mode="nf4", group_size=16),
    "mxfp4, transposed": partial(record, 3, 160, 96, mode="mxfp4", transpose=True),
    "mxfp8": partial(record, 3, 96, 160, mode="mxfp8"),
    "nvfp8, transposed, scales of two blocks": partial(
        record, 3, 2304, 130, mode="nvfp8", group_size=16, transpose=True
    ),
    "groups longer than a tile": partial(record, 3, 96, 2048, group_size=1024),
}


def passes(made, cotangent):
    pullback = Pullback(record=made, residuals=(), output=None, cotangent=cotangent, grad_fields=frozenset({"x"}))
    return forward(made, TILES)[0], backward(pullback, TILES)["x"]


def compare(made, got, cotangent):
    output, pull = jax.vjp(lambda x: reference(dataclasses.replace(made, x=x))[0], made.x)
    for mine, wanted in zip(got, (output, *pull(cotangent)), strict=True):
        assert (mine.dtype, mine.shape) == (wanted.dtype, wanted.shape)
        size = float(jnp.abs(wanted.astype(jnp.float32)).max())
        close(mine.astype(jnp.float32) / size, wanted.astype(jnp.float32) / size, made.x.dtype)


def cotangent_of(made):
    columns = made.scales.shape[0] if made.transpose else made.scales.shape[1] * made.format.group_size
    return jnp.asarray(np.random.default_rng(3).normal(size=(made.x.shape[0], columns)), made.x.dtype)


@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients(name):
    made = CASES[name]()
    with interpreted():
        compare(made, jax.jit(passes)(made, cotangent_of(made)), cotangent_of(made))


@pytest.mark.parametrize(
    "made",
    [
        partial(record, 5, 1056, 150, transpose=True, dtype="bfloat16"),
        partial(record, 11, 150, 1056, mode="symmetric", dtype="bfloat16", stored="float32"),
    ],
)
def test_values_and_gradients_of_codes_that_are_dequantized_in_pairs(made):
    made, device = made(), DeviceInfo(platform="tpu", vendor="google", kind="TPU v6 lite")
    with interpreted(), target_device(device):
        assert make_spec(made, TILES).unpacks_pairs
        compare(made, jax.jit(passes)(made, cotangent_of(made)), cotangent_of(made))


@pytest.mark.parametrize("scale", [6e-8, 3e-5])
def test_float16_scales_are_decoded_exactly_including_subnormals(scale):
    made = CASES["int4, transposed"]()
    made = dataclasses.replace(made, scales=jnp.full_like(made.scales, scale), x=made.x.astype(jnp.float32))
    with interpreted():
        compare(made, jax.jit(passes)(made, cotangent_of(made)), cotangent_of(made))


def test_the_kernels_have_no_races():
    made = record(20, 160, 150, transpose=True)
    with simulated():
        got = jax.block_until_ready(jax.jit(passes)(made, cotangent_of(made)))
    assert not found()
    compare(made, got, cotangent_of(made))


def test_invalid_quantized_tiles_are_refused():
    made = CASES["int8"]()
    with pytest.raises(ValueError, match="block_w=100, wants a multiple of 128"):
        forward(made, TpuQuantized(block_m=16, block_r=128, block_w=100))
    with pytest.raises(ValueError, match="block_m=8, wants a multiple of 16"):
        forward(made, TpuQuantized(block_m=8, block_r=128, block_w=128))
