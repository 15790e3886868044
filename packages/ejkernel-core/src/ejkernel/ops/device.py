"""Which device a call is for: the facts that dispatch and tuning may look at."""

import contextlib
import dataclasses
import functools
from collections.abc import Generator
from typing import Any

import jax

from ejkernel import _compat


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeviceInfo:
    """One kind of device.

    Attributes:
        platform: `"cpu"`, `"gpu"` or `"tpu"`.
        vendor: `"nvidia"`, `"amd"`, `"google"` or `""` for CPUs.
        kind: JAX's `device_kind`, for example `"NVIDIA H200"`.
        compute_capability: For NVIDIA, for example 9.0; None elsewhere.
    """

    platform: str
    vendor: str = ""
    kind: str = ""
    compute_capability: float | None = None

    @property
    def names(self) -> frozenset[str]:
        """Everything `Requires.devices` may call this device."""
        return frozenset({self.platform, self.vendor} - {""})

    def __str__(self) -> str:
        capability = "" if self.compute_capability is None else f" (sm_{round(self.compute_capability * 10)})"
        return f"{self.kind or self.platform}{capability}"


# Part of the key of every jitted function. Made at import, as the other contexts are: one that joins later makes JAX
# trace everything again. It touches no device.
_target: Any = jax.make_user_context(None)


@contextlib.contextmanager
def target_device(device: DeviceInfo) -> Generator[None]:
    """Dispatches calls traced inside the block for `device`, which need not be in this machine.

    For ahead-of-time compilation and `jax.export`. The target is part of the jit cache key.
    """
    with _target(device):
        yield


def current_device(array: Any = None) -> DeviceInfo:
    """The device a call is for: the `target_device` block, else where `array` lives, else JAX's default device."""
    if _target.value is not None:
        return _target.value
    if isinstance(array, jax.Array) and not _compat.is_tracer(array):
        return device_info(next(iter(array.sharding.device_set)))
    return device_info(_compat.default_device())


@functools.cache
def device_info(device: Any) -> DeviceInfo:
    """The facts about one `jax.Device`."""
    name = str(device.platform)
    platform = {"cuda": "gpu", "rocm": "gpu"}.get(name, name)
    vendor = {"tpu": "google", "cpu": ""}.get(platform) or (_gpu_vendor(device) if platform == "gpu" else "")
    capability = getattr(device, "compute_capability", None) if vendor == "nvidia" else None
    return DeviceInfo(
        platform=platform,
        vendor=vendor,
        kind=device.device_kind,
        compute_capability=None if capability is None else float(capability),
    )


def _gpu_vendor(device: Any) -> str:
    version = getattr(device.client, "platform_version", "").lower()
    return "amd" if "rocm" in version else "nvidia"
