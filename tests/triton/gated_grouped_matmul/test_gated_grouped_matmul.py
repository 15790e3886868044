"""The gated grouped matmul in Triton: its numbers in the interpreter, and what its kernel takes of a chip."""

import jax
import jax.numpy as jnp
import pytest
from triton_chips import CHIPS, assert_conforms, assert_fits_and_spills_nothing

from ejkernel.families.gated_grouped_matmul import GatedGroupedMatmul
from ejkernel.modules import gated_grouped_matmul
from ejkernel.ops import explain
from ejkernel.ops.device import target_device
from ejkernel.types.pullback import Pullback
from ejkernel_triton import launch
from ejkernel_triton.gated_grouped_matmul import config
from ejkernel_triton.gated_grouped_matmul.backward import backward
from ejkernel_triton.gated_grouped_matmul.forward import forward

TESTS = "(test_value and not eager) or test_gradient"
GPT_OSS = {"interleaved": True, "alpha": 1.702, "beta": 1.0, "limit": 7.0}


def test_conformance():
    assert_conforms(["gated_grouped_matmul"], TESTS, serves_all=False)


@pytest.mark.parametrize(
    ("chip", "rows", "dtype"),
    [
        *((chip, 65536, jnp.bfloat16) for chip in ("sm_80", "sm_90", "gfx942")),
        ("sm_90", 1024, jnp.bfloat16),
        ("sm_90", 65536, jnp.float32),
    ],
)
@pytest.mark.parametrize("terms", [{}, GPT_OSS, {"transpose_rhs": True}, {"gated": False, "activation": "relu2"}])
def test_the_kernel_fits_the_chip_and_spills_nothing(chip, rows, dtype, terms):
    shape, device = jax.ShapeDtypeStruct, CHIPS[chip]
    record = GatedGroupedMatmul(
        lhs=shape((8192, 2048), dtype),
        rhs=shape((128, 1536, 2048) if "transpose_rhs" in terms else (128, 2048, 1536), dtype),
        rhs_bias=shape((128, 1, 1536), dtype) if "limit" in terms else None,
        group_sizes=shape((128,), jnp.int32),
        indices=shape((rows,), jnp.int32),
        left_over="zero",
        **terms,
    )
    with target_device(device), launch.collect_launches() as calls:
        tiles = config.heuristic(record, device, "forward")
        jax.eval_shape(lambda record: forward(record, tiles)[0], record)
    assert_fits_and_spills_nothing(calls, chip)


@pytest.mark.parametrize("terms", [{}, GPT_OSS])
def test_both_passes_are_served_on_a_gpu(terms):
    """Nothing but a missing jax-triton keeps Triton from the call and from its gradients."""
    shape = jax.ShapeDtypeStruct
    rhs, sizes = shape((32, 2880, 5760), jnp.bfloat16), shape((32,), jnp.int32)
    bias = {"rhs_bias": shape((32, 5760), jnp.bfloat16)} if terms else {}
    with target_device("h200"):
        decision = explain(gated_grouped_matmul, shape((16384, 2880), jnp.bfloat16), rhs, sizes, **bias, **terms)
    for choice in (decision.forward, decision.backward):
        (triton,) = (verdict for verdict in choice.verdicts if verdict.implementation.name == "triton")
        assert all(reason.startswith("module jax_triton") for reason in triton.reasons)


@pytest.mark.parametrize(
    ("dtype", "bias_dtype", "summed"),
    [
        (jnp.bfloat16, jnp.bfloat16, jnp.bfloat16),
        (jnp.bfloat16, jnp.float32, jnp.float32),
        (jnp.float16, jnp.bfloat16, jnp.float32),  # bfloat16 holds numbers that float16 does not
    ],
)
def test_biases_are_summed_from_the_cotangent_that_the_products_read(dtype, bias_dtype, summed):
    """A float32 cotangent of 16-bit rows was stored for the biases alone."""
    shape = jax.ShapeDtypeStruct
    record = GatedGroupedMatmul(
        lhs=shape((4096, 256), dtype),
        rhs=shape((4, 256, 1024), dtype),
        group_sizes=shape((4,), jnp.int32),
        rhs_bias=shape((4, 1, 1024), bias_dtype),
        left_over="zeros",
    )
    cotangent, names = shape((4096, 512), dtype), frozenset({"lhs", "rhs", "rhs_bias"})

    def run(record, cotangent):
        saved = Pullback(record=record, residuals=(), output=cotangent, cotangent=cotangent, grad_fields=names)
        return backward(saved, config.heuristic(record, CHIPS["sm_90"], "backward"))

    with target_device(CHIPS["sm_90"]), launch.collect_launches() as calls:
        gradients = jax.eval_shape(lambda *x: run(*x), record, cotangent)
    (sums,) = (call for call in calls if call.kernel.__name__ == "grouped_dbias_kernel")
    assert sums.inputs[0].dtype == summed
    assert gradients["rhs_bias"].dtype == bias_dtype
