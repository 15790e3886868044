"""Ring attention in Triton: every kind of step in Triton's interpreter, which is chosen at import."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton has wheels for Linux alone")


def test_every_kind_of_step_gives_the_numbers_of_one_device():
    flags = "--xla_force_host_platform_device_count=2"
    environment = {**os.environ, "TRITON_INTERPRET": "1", "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    command = [sys.executable, str(Path(__file__).with_name("ring_process.py"))]
    ran = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=110, check=False)
    assert ran.returncode == 0, ran.stderr[-3000:]
