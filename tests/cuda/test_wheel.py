"""The CUDA wheel runs where manylinux_2_28 does: no symbol is newer than the C and C++ libraries of that time."""

import os
import re
import shutil
import subprocess
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
WHEELS = os.environ.get("EJKERNEL_CUDA_WHEELS")
NEWEST = {"GLIBC": (2, 28), "GLIBCXX": (3, 4, 24), "CXXABI": (1, 3, 11), "GCC": (7, 0, 0)}
"""What the policy of manylinux_2_28 allows."""


def too_new(listing: str) -> list[str]:
    """The versions in a listing of dynamic symbols that the policy does not have."""
    found = set(re.findall(r"\b(GLIBCXX|GLIBC|CXXABI|GCC)_([0-9][0-9.]*)", listing))
    return sorted(f"{name}_{v}" for name, v in found if tuple(map(int, v.split("."))) > NEWEST[name])


def test_symbols_newer_than_a_glibc_version_are_found():
    assert too_new("(GLIBC_2.34) pthread_join (GLIBC_2.2.5) free (GLIBCXX_3.4.29) x") == [
        "GLIBCXX_3.4.29",
        "GLIBC_2.34",
    ]
    assert too_new("(GLIBC_2.28) a (GLIBCXX_3.4.21) b (CXXABI_1.3.9) c (GCC_3.0) d") == []


def test_the_build_links_against_an_old_c_library():
    """`tests` do not build wheels; this keeps the parts of the build that make them old."""
    manifest = tomllib.loads((ROOT / "packages/ejkernel-cuda/pyproject.toml").read_text())
    (override,) = manifest["tool"]["scikit-build"]["overrides"]
    assert any(line.startswith("ziglang") for line in override["build"]["requires"])
    assert "linux-gnu.2.28" in (ROOT / "packages/ejkernel-cuda/CMakeLists.txt").read_text()
    assert '"--plat", tag' in (ROOT / "noxfile.py").read_text()


@pytest.mark.needs("cuda wheel")
def test_no_symbol_of_the_wheel_is_newer_than_manylinux_2_28(tmp_path):
    objdump = shutil.which("objdump")
    assert objdump, "objdump, of binutils, is needed to look at the wheel"
    (wheel,) = Path(str(WHEELS)).glob("ejkernel_cuda-*.whl")
    assert "manylinux_2_28" in wheel.name
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith("compiled_kernels.so")]
        library = archive.extract(name, tmp_path)
    listing = subprocess.run([objdump, "-T", library], capture_output=True, text=True, check=True).stdout
    assert "ejkernel_split_decode" in listing
    assert too_new(listing) == []
    shown = [line.split()[-1] for line in listing.splitlines() if " g " in line]
    assert all(symbol.startswith("ejkernel_") for symbol in shown)
