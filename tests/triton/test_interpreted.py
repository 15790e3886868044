"""The Triton kernels' numbers on the CPU: the conformance suite with Triton's interpreter, which is chosen at import.

The interpreter runs program after program in NumPy, so the parts of the suite that add least are left to devices:
determinism, and the eager call, which differ from these in nothing that the kernel sees.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton has wheels for Linux alone")

MASKS = "(causal or window or segments or pack or padded or positions or mask)"
PARTS = {
    "values": "test_value and not test_shapes and not test_residuals and not test_eager",
    "residuals": "test_residuals and (sinks or numerator)",
    "gradients of masks": f"test_gradients and {MASKS}",
    "gradients of the rest": f"test_gradients and not {MASKS}",
    "padding": "test_padding",
    "transforms": "(test_vmap and (sinks or dropout)) or (test_shard and (everything or packed))",
    "candidates": "test_candidates and forward",
}


@pytest.mark.parametrize("part", PARTS)
def test_conformance(part):
    command = [sys.executable, "-m", "pytest", "--pyargs", "ejkernel_conformance", "-q", "-p", "no:cacheprovider"]
    command += ["--ejk-impl", "triton", "--ejk-op", "flash_attention", "-k", PARTS[part]]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "JAX_PLATFORMS": "cpu"}
    environment.pop("PYTEST_ADDOPTS", None)
    ran = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=110, check=False)
    assert ran.returncode == 0, ran.stdout[-3000:]
    assert " passed" in ran.stdout
    assert "skipped" not in ran.stdout


def test_on_several_devices_and_under_checkpoint():
    """`shard_map`, dropout's counters and a sink's gradient among it, `jax.checkpoint` and `jax.vmap`, against XLA."""
    script = Path(__file__).with_name("transformed_process.py")
    flags = "--xla_force_host_platform_device_count=4"
    environment = {**os.environ, "TRITON_INTERPRET": "1", "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    ran = subprocess.run([sys.executable, script], capture_output=True, text=True, env=environment, check=False)
    assert ran.returncode == 0, ran.stderr[-3000:]
