"""The CUDA library, compiled once a run, whichever process needs it first; and kernels, compiled for the host."""

import ctypes
import fcntl
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "packages" / "ejkernel-cuda"
ON_HOST = Path(__file__).parent / "on_host"


@pytest.fixture(scope="session")
def compile_on_host(tmp_path_factory):
    """A function that compiles a program of `on_host` with a folder of kernels, and loads it.

    Texts of the kernels' sources are replaced first, and then what `on_host` has in place of the headers with PTX.
    """

    def compile_on_host(family, replaced, threads=256):
        folder = tmp_path_factory.mktemp("on_host")
        shutil.copytree(PACKAGE / "csrc" / family, folder / family, ignore=shutil.ignore_patterns("*.cu"))
        for old, new in replaced.items():
            sources = {path: path.read_text() for path in (folder / family).iterdir()}
            assert any(old in text for text in sources.values()), old
            for path, text in sources.items():
                path.write_text(text.replace(old, new))
        shutil.copytree(PACKAGE / "csrc" / "common", folder / "common")
        shutil.copytree(ON_HOST, folder, dirs_exist_ok=True)
        device = (folder / "device.h").read_text()
        (folder / "device.h").write_text(device.replace("kThreads = 256", f"kThreads = {threads}"))
        options = ("-std=c++20", "-O1", "-U_FORTIFY_SOURCE", "-w", "-I.", "-shared", "-fPIC")
        command = ("g++", *options, "-o", "host.so", f"{family}.cpp")
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stderr[-3000:]
        return ctypes.CDLL(str(folder / "host.so"))

    return compile_on_host


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
