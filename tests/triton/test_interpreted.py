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

FLASH = ("flash_attention",)
SPARSE = ("blocksparse_attention",)
OTHERS = ("scaled_dot_product_attention", "flash_mla", "mla_decode")
MASKS = "(causal or window or segments or pack or padded or positions or mask)"
VALUES = "(test_value and not test_shapes and not test_residuals and not test_eager)"
GRADIENTS = "(test_gradients and not after_another)"
# Operations other than flash attention lower to the same record, so each has what its own cases add: their numbers.
PARTS = {
    "values": (FLASH, VALUES),
    "residuals": (FLASH, "test_residuals and (sinks or numerator)"),
    "gradients of masks": (FLASH, f"{GRADIENTS} and {MASKS}"),
    "gradients of the rest": (FLASH, f"{GRADIENTS} and not {MASKS}"),
    "gradients after another forward": (FLASH, "after_another and (sinks or numerator or packed)"),
    "padding": (FLASH, "test_padding"),
    "transforms": (FLASH, "(test_vmap and (sinks or dropout)) or (test_shard and (everything or packed))"),
    "candidates": (FLASH, "test_candidates and forward"),
    "patterns": (SPARSE, f"({VALUES} or {GRADIENTS} or test_padding) and (patterns or scattered or chunks)"),
    "transforms of patterns": (SPARSE, "(test_vmap or test_shard) and patterns"),
    "other operations": (OTHERS, f"{VALUES} or {GRADIENTS}"),
    "claims": (FLASH + SPARSE + OTHERS, "test_capabilities"),
}


@pytest.mark.parametrize("part", PARTS)
def test_conformance(part):
    operations, selection = PARTS[part]
    command = [sys.executable, "-m", "pytest", "--pyargs", "ejkernel_conformance", "-q", "-p", "no:cacheprovider"]
    command += ["--ejk-impl", "triton", *(x for op in operations for x in ("--ejk-op", op)), "-k", selection]
    ran = subprocess.run(command, capture_output=True, text=True, env=_environment(), timeout=300, check=False)
    assert ran.returncode == 0, ran.stdout[-3000:]
    assert " passed" in ran.stdout
    assert "skipped" not in ran.stdout


def test_on_several_devices_and_under_checkpoint():
    """`shard_map`, dropout's counters and a sink's gradient among it, `jax.checkpoint` and `jax.vmap`, against XLA."""
    _run("transformed_process.py", XLA_FLAGS="--xla_force_host_platform_device_count=4")


def test_blocks():
    """What the toolkit has for families to come."""
    _run("blocks_process.py")


def _run(script, **variables):
    command = [sys.executable, Path(__file__).with_name(script)]
    ran = subprocess.run(command, capture_output=True, text=True, env=_environment(**variables), check=False)
    assert ran.returncode == 0, ran.stderr[-3000:]


def _environment(**variables):
    environment = {**os.environ, "TRITON_INTERPRET": "1", "JAX_PLATFORMS": "cpu", **variables}
    environment.pop("PYTEST_ADDOPTS", None)
    return environment
