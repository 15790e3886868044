"""Names devices and values in the same way in every process, for keys and file names."""

import hashlib
from typing import Any

import jax
import jax.numpy as jnp
import msgspec

from ejkernel import _compat
from ejkernel.ops.device import device_info

__all__ = ["device_fingerprint", "device_kind", "get_device_platform", "short_hash", "stable_json"]


def device_kind(device: Any = None) -> str:
    """Returns JAX's name for the kind of a device, or of the default device."""
    return (device or _compat.default_device()).device_kind


def device_fingerprint(dev: Any = None) -> str:
    """Returns `"kind|version of the platform"` of a device, by default of JAX's default device."""
    device = dev or _compat.default_device()
    return f"{device.device_kind}|{getattr(device.client, 'platform_version', '') or device.platform}"


def get_device_platform(dev: Any = None) -> str:
    """Returns the platform: `"gpu"`, `"tpu"`, `"cpu"` or `"unknown"`."""
    platform = device_info(dev or _compat.default_device()).platform
    return platform if platform in ("gpu", "tpu", "cpu") else "unknown"


def stable_json(obj: Any) -> str:
    """Returns JSON text that is equal for equal values: keys are sorted, arrays are their shapes and dtypes.

    Dataclasses are objects, dtypes their names; what JSON does not name is its `repr`.
    """
    return msgspec.json.encode(obj, enc_hook=_description_for_hash, order="sorted").decode()


def short_hash(obj: Any) -> str:
    """Returns the first 16 hexadecimal digits of the SHA-256 of a text, or of `stable_json` of any other value."""
    text = obj if isinstance(obj, str) else stable_json(obj)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _description_for_hash(value: Any) -> Any:
    if isinstance(value, jax.Array | jax.ShapeDtypeStruct) or hasattr(value, "__array__"):
        return {"shape": list(jnp.shape(value)), "dtype": str(jax.dtypes.result_type(value))}
    if hasattr(value, "dtype"):  # jnp.float32 and its like
        return jnp.dtype(value.dtype).name
    return repr(value)
