"""The CUDA library, compiled once a run, whichever process needs it first."""

import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "packages" / "ejkernel-cuda"


@pytest.fixture(scope="session")
def compiled(tmp_path_factory):
    """The folder of the library, compiled for one chip as the distribution compiles it."""
    base = tmp_path_factory.getbasetemp()
    # The processes of a run in parallel have folders of their own in a common one.
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "compiled_kernels"
    folder.mkdir(exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "compiled_kernels.so").exists():
            _compile(folder)
    return folder


def _compile(folder):
    settings = (f"-DPython_EXECUTABLE={sys.executable}", "-DCMAKE_CUDA_ARCHITECTURES=90a-real")
    for command in (
        ("cmake", "-S", str(PACKAGE), "-B", str(folder), "-DCMAKE_BUILD_TYPE=Release", *settings),
        ("cmake", "--build", str(folder)),
    ):
        done = subprocess.run(command, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stdout + done.stderr
