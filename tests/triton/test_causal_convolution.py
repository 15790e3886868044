"""The causal convolution in Triton: its numbers in the interpreter, and what its kernels take of a chip."""

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

pytest.importorskip("triton", reason="Triton has wheels for Linux alone")

from ejkernel.families.causal_convolution import CausalConvolution
from ejkernel.ops.device import DeviceInfo, target_device
from ejkernel.ops.pullback import Pullback
from ejkernel_triton import ahead, chips, launch
from ejkernel_triton.causal_convolution import config
from ejkernel_triton.causal_convolution.passes import backward, forward

CHIPS = {
    "sm_80": DeviceInfo(platform="gpu", vendor="nvidia", kind="NVIDIA A100", compute_capability=8.0),
    "sm_90": DeviceInfo(platform="gpu", vendor="nvidia", kind="NVIDIA H200", compute_capability=9.0),
    "sm_100": DeviceInfo(platform="gpu", vendor="nvidia", kind="NVIDIA B200", compute_capability=10.0),
    "sm_120": DeviceInfo(platform="gpu", vendor="nvidia", kind="NVIDIA RTX 5090", compute_capability=12.0),
    "gfx942": DeviceInfo(platform="gpu", vendor="amd", kind="AMD Instinct MI300X"),
}
# States of packed sequences are not claimed: XLA serves them.
TESTS = "(test_value and not shapes and not eager) or (test_gradients and not after) or test_capabilities"


def test_conformance():
    command = [sys.executable, "-m", "pytest", "--pyargs", "ejkernel_conformance", "-q", "-p", "no:cacheprovider"]
    command += ["--ejk-impl", "triton", "--ejk-op=causal_conv1d", "-k", f"({TESTS}) and not states"]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "JAX_PLATFORMS": "cpu"}
    environment.pop("PYTEST_ADDOPTS", None)
    ran = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=200, check=False)
    assert ran.returncode == 0, ran.stdout[-3000:]
    assert " passed" in ran.stdout
    assert "skipped" not in ran.stdout


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
        saved = Pullback(record=record, residuals=residuals, output=output, cotangent=output, wanted=wanted)
        return backward(saved, config.heuristic(record, device, "backward"))

    with target_device(device), launch.collected() as calls:
        jax.eval_shape(run, record)
    assert [call.kernel.__name__ for call in calls] == ["forward_kernel", "backward_kernel"]
    for call in calls:
        took = ahead.compile_for(call, chip)
        assert took.spilled == 0, (took.kernel, took.registers, took.spilled)
        assert took.shared <= chips.CHIPS[chip].shared_memory
