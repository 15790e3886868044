"""Finds the toolchain of a run: versions, and digests of the sources."""

import importlib
import importlib.metadata
import platform
import subprocess
from collections.abc import Iterable
from typing import Any

from ejkernel._version import __version__
from ejkernel.ops.model import Implementation
from ejkernel.ops.plugins import registry
from ejkernel.ops.source_digest import source_digest

DISTRIBUTIONS = ("jax", "jaxlib", "jax-triton", "triton", "numpy", "nvidia-cudnn-cu13")


def versions() -> dict[str, str]:
    """Returns the versions of all that kernels are compiled and run with, by name; what is not there is left out."""
    found = {"ejkernel": __version__, "python": platform.python_version()}
    for name in DISTRIBUTIONS:
        if version := _version(name):
            found[name.replace("-", "_")] = version
    return found | _cuda_versions()


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cuda_versions() -> dict[str, str]:
    """Returns the CUDA and cuDNN that JAX loads, and the driver; nothing without an NVIDIA GPU."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        driver = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
        library: Any = importlib.import_module("jax._src.lib").cuda_versions
    except (OSError, subprocess.SubprocessError, ImportError, AttributeError):
        return {}
    found = {"driver": driver.splitlines()[0].strip()}
    if library is not None:
        cuda, cudnn = library.cuda_runtime_get_version(), library.cudnn_get_version()
        found |= {"cuda": f"{cuda // 1000}.{cuda % 1000 // 10}", "cudnn": f"{cudnn // 10000}.{cudnn % 10000 // 100}"}
    return found


def implementations() -> dict[tuple[str, str], Implementation]:
    """Returns every registered implementation, by family and name."""
    return {(i.family, i.name): i for listed in registry().implementations.values() for i in listed}


def digests(which: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Digests of implementations' sources, by `"family/name"`."""
    known = implementations()
    return {"/".join(key): source_digest(known[key]) for key in sorted(which)}
