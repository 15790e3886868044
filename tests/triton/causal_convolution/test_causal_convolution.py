"""The causal convolution in Triton: its numbers in the interpreter, and what its kernels take of a chip."""

import jax
import jax.numpy as jnp
import pytest
from triton_chips import CHIPS, assert_conforms, assert_fits_and_spills_nothing

from ejkernel.families.causal_convolution import CausalConvolution
from ejkernel.ops.device import target_device
from ejkernel.types.pullback import Pullback
from ejkernel_triton import launch
from ejkernel_triton.causal_convolution import config
from ejkernel_triton.causal_convolution.backward import backward
from ejkernel_triton.causal_convolution.forward import forward

# States of packed sequences are not claimed: XLA serves them.
TESTS = "(test_value and not shapes and not eager) or (test_gradients and not after) or test_gives_gradient"


def test_conformance():
    assert_conforms(("causal_conv1d",), f"({TESTS} or (test_request and packed)) and not states")


@pytest.mark.parametrize(
    ("chip", "width", "packed", "dtype"),
    [
        *((chip, 4, False, jnp.bfloat16) for chip in CHIPS),
        ("sm_90", 8, False, jnp.bfloat16),
        ("sm_90", 4, True, jnp.bfloat16),
        ("sm_90", 4, False, jnp.float32),
    ],
)
def test_kernels_fit_the_chip_and_spill_nothing(chip, width, packed, dtype):
    device, shape = CHIPS[chip], jax.ShapeDtypeStruct
    record = CausalConvolution(
        x=shape((1 if packed else 8, 4096, 4096), dtype),
        weight=shape((4096, width), dtype),
        bias=shape((4096,), dtype),
        cu_seqlens=shape((9,), jnp.int32) if packed else None,
        activation="silu",
    )

    def run(record):
        output, residuals = forward(record, config.heuristic(record, device, "forward"))
        wanted = frozenset({"x", "weight", "bias"})
        saved = Pullback(record=record, residuals=residuals, output=output, cotangent=output, grad_fields=wanted)
        return backward(saved, config.heuristic(record, device, "backward"))

    with target_device(device), launch.collect_launches() as calls:
        jax.eval_shape(run, record)
    assert [call.kernel.__name__ for call in calls] == ["causal_conv_fwd_kernel", "causal_conv_bwd_kernel"]
    assert_fits_and_spills_nothing(calls, chip)
