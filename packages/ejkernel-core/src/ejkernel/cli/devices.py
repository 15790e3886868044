"""Finds this machine's devices, without messages of a libtpu that is installed only for its compiler."""

import contextlib
import os
import sys
from collections.abc import Generator
from pathlib import Path
from typing import Any

import jax

LIBTPU_PATH_VARIABLE = "TPU_LIBRARY_PATH"  # importing libtpu sets it, and JAX reads it
DEVICE_NODES = ("accel*", "vfio/[0-9]*")  # in /dev, of a machine with TPUs


def find_devices() -> list[Any]:
    """Returns the devices that JAX finds; every command that needs a device calls this first.

    `pip install 'ejkernel-pallas[aot]'` installs libtpu on machines without a TPU. JAX starts it there too, and libtpu
    then writes errors about missing metadata to the standard error. So JAX cannot import libtpu while it looks for
    devices.

    Raises:
        RuntimeError: JAX finds no device of a platform that `JAX_PLATFORMS` names.
    """
    with contextlib.nullcontext() if _may_have_tpu() else _without_libtpu():
        return jax.devices()


def _may_have_tpu() -> bool:
    """Says whether `jax_platforms` names TPUs, as it does when JAX finds one, or /dev has files of a TPU."""
    named = "tpu" in (getattr(jax.config, "jax_platforms", None) or "").split(",")
    return named or any(next(Path("/dev").glob(pattern), None) is not None for pattern in DEVICE_NODES)


@contextlib.contextmanager
def _without_libtpu() -> Generator[None]:
    """Makes `import libtpu` fail inside the block, and restores what was imported."""
    missing = object()
    module, path = sys.modules.get("libtpu", missing), os.environ.pop(LIBTPU_PATH_VARIABLE, None)
    sys.modules["libtpu"] = None  # pyright: ignore[reportArgumentType]
    try:
        yield
    finally:
        del sys.modules["libtpu"]
        if module is not missing:
            sys.modules["libtpu"] = module  # pyright: ignore[reportArgumentType]
        if path is not None:
            os.environ[LIBTPU_PATH_VARIABLE] = path
