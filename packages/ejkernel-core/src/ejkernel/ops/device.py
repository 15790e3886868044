"""The device of a call: the facts that dispatch and tuning may read."""

import contextlib
import dataclasses
import functools
from collections.abc import Generator
from typing import Any

import jax

from ejkernel import _compat
from ejkernel.suggestion import did_you_mean


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
        """Returns the names by which `Requires.devices` may list this device."""
        return frozenset({self.platform, self.vendor} - {""})

    def __str__(self) -> str:
        capability = "" if self.compute_capability is None else f" (sm_{round(self.compute_capability * 10)})"
        return f"{self.kind or self.platform}{capability}"


def _nvidia_device(kind: str, capability: float) -> DeviceInfo:
    return DeviceInfo(platform="gpu", vendor="nvidia", kind=f"NVIDIA {kind}", compute_capability=capability)


def _tpu(kind: str) -> DeviceInfo:
    return DeviceInfo(platform="tpu", vendor="google", kind=kind)


DEVICES_BY_SHORT_NAME: dict[str, DeviceInfo] = {
    "a100": _nvidia_device("A100-SXM4-80GB", 8.0),
    "h100": _nvidia_device("H100 80GB HBM3", 9.0),
    "h200": _nvidia_device("H200", 9.0),
    "b200": _nvidia_device("B200", 10.0),
    "mi300x": DeviceInfo(platform="gpu", vendor="amd", kind="AMD Instinct MI300X"),
    "v5e": _tpu("TPU v5 lite"),
    "v5p": _tpu("TPU v5"),
    "v6e": _tpu("TPU v6 lite"),
    "v7x": _tpu("TPU7x"),
    "cpu": DeviceInfo(platform="cpu", kind="cpu"),
}
"""Devices that `target_device` accepts by a short name."""

VENDORS_BY_PLATFORM = {"cpu": frozenset({""}), "gpu": frozenset({"nvidia", "amd"}), "tpu": frozenset({"google"})}


def find_device(device: Any) -> DeviceInfo:
    """Returns the device that a short name or a device kind means, or a `DeviceInfo` itself if its fields fit together.

    Args:
        device: A key of `DEVICES_BY_SHORT_NAME`, the `kind` of one of its values, or a description of any other device.

    Raises:
        ValueError: There is no such kind, or the description contradicts itself.
    """
    if isinstance(device, str):
        by_name = DEVICES_BY_SHORT_NAME | {info.kind: info for info in DEVICES_BY_SHORT_NAME.values()}
        match = by_name.get(device) or by_name.get(device.casefold())
        if match is None:
            raise ValueError(
                f"device: got {device!r}, wants one of {', '.join(DEVICES_BY_SHORT_NAME)}, "
                f"or a DeviceInfo for another device"
                f"{did_you_mean(device, by_name)}"
            )
        return match
    if not isinstance(device, DeviceInfo):
        raise ValueError(f"device: got {device!r}, wants a DeviceInfo or one of {', '.join(DEVICES_BY_SHORT_NAME)}")
    reason = next(_device_description_errors(device), None)
    if reason is not None:
        raise ValueError(f"device: got {device!r}, {reason}; known kinds are {', '.join(DEVICES_BY_SHORT_NAME)}")
    return device


def _device_description_errors(device: DeviceInfo) -> Generator[str]:
    """Yields what is wrong with the description of a device; the engine would not match such a device
    with any kernel.
    """
    if device.platform not in VENDORS_BY_PLATFORM:
        yield f"whose platform is not one of {', '.join(VENDORS_BY_PLATFORM)}"
    elif device.vendor not in VENDORS_BY_PLATFORM[device.platform]:
        vendors = " or ".join(sorted(map(repr, VENDORS_BY_PLATFORM[device.platform])))
        yield f"whose vendor is not {vendors}, as it must be on platform {device.platform!r}"
    if device.vendor == "nvidia" and device.compute_capability is None:
        yield "which needs compute_capability=, for example 9.0, as every NVIDIA GPU does"
    if device.vendor != "nvidia" and device.compute_capability is not None:
        yield "whose compute_capability is not None, which only NVIDIA GPUs have"


# Part of the key of every jitted function. Made at import, as the other contexts are: one that joins later makes JAX
# trace everything again. It touches no device.
_target_context: Any = jax.make_user_context(None)


@contextlib.contextmanager
def target_device(device: DeviceInfo | str) -> Generator[None]:
    """Dispatches calls traced inside the block for `device`, which need not be in this machine.

    For ahead-of-time compilation, `jax.export` and `ejkernel.explain`. The target is part of the jit cache key.

    Args:
        device: A short name such as `"h200"` or `"v6e"`, JAX's `device_kind` such as `"NVIDIA H200"`, or a
            `DeviceInfo` for a device that `ejkernel.ops.device.DEVICES_BY_SHORT_NAME` does not have.

    Raises:
        ValueError: There is no such kind, or the `DeviceInfo` contradicts itself; the message lists the kinds.
    """
    with _target_context(find_device(device)):
        yield


def current_device(array: Any = None) -> DeviceInfo:
    """Returns the device of a call: that of the `target_device` block, else that of `array`, else JAX's default."""
    if _target_context.value is not None:
        return _target_context.value
    if isinstance(array, jax.Array) and not _compat.is_tracer(array):
        return device_info(next(iter(array.sharding.device_set)))
    return device_info(_compat.default_device())


@functools.cache
def device_info(device: Any) -> DeviceInfo:
    """Returns the facts about one `jax.Device`."""
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
