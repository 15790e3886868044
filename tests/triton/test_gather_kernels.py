"""Gather-reduce in Triton: its numbers in the interpreter, and what its kernels take of a chip."""

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

pytest.importorskip("triton", reason="Triton has wheels for Linux alone")

from ejkernel.families.gather_reduce import GatherReduce
from ejkernel.ops import dispatch
from ejkernel.ops.device import DeviceInfo, target_device
from ejkernel.ops.plugins import registry
from ejkernel.ops.pullback import Pullback
from ejkernel_triton import ahead, chips, launch
from ejkernel_triton.gather_reduce import config
from ejkernel_triton.gather_reduce.passes import backward, forward

CHIPS = {
    "sm_80": DeviceInfo(platform="gpu", vendor="nvidia", kind="NVIDIA A100", compute_capability=8.0),
    "sm_90": DeviceInfo(platform="gpu", vendor="nvidia", kind="NVIDIA H200", compute_capability=9.0),
    "sm_100": DeviceInfo(platform="gpu", vendor="nvidia", kind="NVIDIA B200", compute_capability=10.0),
    "sm_120": DeviceInfo(platform="gpu", vendor="nvidia", kind="NVIDIA RTX 5090", compute_capability=12.0),
    "gfx942": DeviceInfo(platform="gpu", vendor="amd", kind="AMD Instinct MI300X"),
}
TESTS = "(test_value and not eager) or test_gradients or test_capabilities or test_candidates or test_vmap"
INTERPRETED = {**os.environ, "TRITON_INTERPRET": "1", "JAX_PLATFORMS": "cpu"}


def test_conformance():
    command = [sys.executable, "-m", "pytest", "--pyargs", "ejkernel_conformance", "-q", "-p", "no:cacheprovider"]
    command += ["--ejk-impl", "triton", "--ejk-op=gather_reduce", "-k", TESTS]
    environment = {name: x for name, x in INTERPRETED.items() if name != "PYTEST_ADDOPTS"}
    ran = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=200, check=False)
    assert ran.returncode == 0, ran.stdout[-3000:]
    assert " passed" in ran.stdout
    assert "skipped" not in ran.stdout


def record_of(kind, dtype=jnp.bfloat16):
    """Dispatch or combine of 8192 tokens of 2048 channels, with 8 experts each."""
    shape = jax.ShapeDtypeStruct
    pairs, tokens = shape((65536, 1), jnp.int32), shape((8192, 8), jnp.int32)
    if kind == "dispatch":
        return GatherReduce(rows=shape((8192, 2048), dtype), indices=pairs, inverse=tokens)
    weights = shape((8192, 8), jnp.float32)
    return GatherReduce(rows=shape((65536, 2048), dtype), indices=tokens, inverse=pairs, weights=weights)


def passes(device):
    """Both passes with the tiles of a device."""

    def run(record):
        output, residuals = forward(record, config.heuristic(record, device, "forward"))
        wanted = frozenset({"rows"} if record.weights is None else {"rows", "weights"})
        saved = Pullback(record=record, residuals=residuals, output=output, cotangent=output, wanted=wanted)
        return backward(saved, config.heuristic(record, device, "backward"))

    return run


@pytest.mark.parametrize(
    ("chip", "kind", "dtype"),
    [
        *((chip, "combine", jnp.bfloat16) for chip in CHIPS),
        ("sm_90", "dispatch", jnp.bfloat16),
        ("sm_90", "combine", jnp.float32),
    ],
)
def test_kernels_fit_the_chip_and_spill_nothing(chip, kind, dtype):
    device = CHIPS[chip]
    with target_device(device), launch.collected() as calls:
        jax.eval_shape(passes(device), record_of(kind, dtype))
    assert [call.kernel.__name__ for call in calls] == ["sums_kernel", "gradients_kernel"]
    for call in calls:
        took = ahead.compile_for(call, chip)
        assert took.spilled == 0, (took.kernel, took.registers, took.spilled)
        assert took.shared <= chips.CHIPS[chip].shared_memory
        if chip.startswith("sm_"):
            assert "global.v4" in took.assembly, took.kernel


def test_kernels_are_taken_before_xla():
    op, device = registry().ops["gather_reduce"], CHIPS["sm_90"]
    for direction in ("forward", "backward"):
        found = dispatch.choose(op, record_of("combine"), device, "auto", direction)
        names = [verdict.implementation.name for verdict in found.verdicts]
        assert names.index("triton") < names.index("xla")
