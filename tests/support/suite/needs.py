"""What a test needs that a machine may lack: `@pytest.mark.needs("gpu")`.

A test whose need is absent is not collected. A line of the report says how many there are, and which command runs them.
"""

import functools
import importlib.util
import os
import shutil
import subprocess
from collections import Counter
from collections.abc import Callable

import jax
import pytest


def _has_module(name: str) -> Callable[[], bool]:
    return lambda: importlib.util.find_spec(name) is not None


def _cuda_compiler() -> bool:
    packaged = _has_module("nvidia")() and _has_module("nvidia.cu13")()
    return bool(shutil.which("cmake") and shutil.which("g++") and (packaged or shutil.which("nvcc")))


def _interprets_gpu_kernels() -> bool:
    from jax.experimental.pallas import mosaic_gpu  # noqa: TID251  # asks about it, uses nothing of it

    return hasattr(mosaic_gpu, "InterpretGPUParams")


def _cudnn_has_gradients() -> bool:
    from ejkernel.ops.plugins import registry

    return any(i.name == "cudnn" and i.backward for i in registry().implementations["flash_attention"])


CHECK_AND_COMMAND_BY_NEED: dict[str, tuple[Callable[[], bool], str]] = {
    "gpu": (lambda: jax.default_backend() == "gpu", "pytest, on a machine with a GPU"),
    "2 devices": (lambda: jax.device_count() >= 2, "nox -s tests"),
    "4 devices": (lambda: jax.device_count() >= 4, "nox -s tests"),
    "g++": (lambda: shutil.which("g++") is not None, "nox -s tests, on a machine with g++"),
    "cuda compiler": (_cuda_compiler, "nox -s thorough, on Linux with g++"),
    "libtpu": (_has_module("libtpu"), "nox -s thorough, on Linux"),
    "gpu interpreter": (_interprets_gpu_kernels, "nox -s tests, with another JAX"),
    "cudnn without gradients": (lambda: not _cudnn_has_gradients(), "pytest, where XLA_FLAGS ask for no determinism"),
    "wheels": (lambda: "EJKERNEL_WHEELS" in os.environ, "nox -s resolve"),
    "cuda wheel": (lambda: "EJKERNEL_CUDA_WHEELS" in os.environ, "nox -s wheels"),
}
"""By name: whether it is here, and which command runs the tests that need it."""


NEEDS_OF_NOX_TESTS = frozenset({"2 devices", "4 devices", "g++", "gpu interpreter", "cudnn without gradients"})
"""What `nox -s tests` may count on; tests that need anything else are left to other commands, wherever it runs."""


def is_left_to_other_commands(item: pytest.Item) -> bool:
    """Whether a test needs what `nox -s tests` does not install."""
    return not NEEDS_OF_NOX_TESTS.issuperset(_needs_of_test(item))


@functools.cache
def is_met(need: str) -> bool:
    """Whether a need is met on this machine.

    Raises:
        pytest.UsageError: There is no such need.
    """
    if need.startswith("python3."):
        command = shutil.which(need)
        return bool(command) and subprocess.run([command, "-c", ""], capture_output=True).returncode == 0
    if need not in CHECK_AND_COMMAND_BY_NEED:
        raise pytest.UsageError(
            f"mark needs: got {need!r}, wants one of {', '.join(CHECK_AND_COMMAND_BY_NEED)} or python3.N"
        )
    return CHECK_AND_COMMAND_BY_NEED[need][0]()


def command_that_runs(need: str) -> str:
    """Which command runs the tests that need something."""
    return (
        CHECK_AND_COMMAND_BY_NEED[need][1] if need in CHECK_AND_COMMAND_BY_NEED else f"pytest, on a machine with {need}"
    )


def remove_tests_with_unmet_needs(items: list[pytest.Item], only: str | None = None) -> list[str]:
    """Removes the tests that cannot run here, and returns a line per need that is absent.

    Args:
        items: The collected tests.
        only: Keep those alone that have this need.
    """
    if only is not None:
        items[:] = [item for item in items if only in _needs_of_test(item)]
    absent = {item: missing for item in items if (missing := _first_unmet_need(item))}
    items[:] = [item for item in items if item not in absent]
    counts = Counter(absent.values())
    return [
        f"{need} is not here: {count:,} tests, which {command_that_runs(need)} runs"
        for need, count in sorted(counts.items())
    ]


def _first_unmet_need(item: pytest.Item) -> str | None:
    return next((need for need in _needs_of_test(item) if not is_met(need)), None)


def _needs_of_test(item: pytest.Item) -> list[str]:
    return [need for mark in item.iter_markers("needs") for need in mark.args]
