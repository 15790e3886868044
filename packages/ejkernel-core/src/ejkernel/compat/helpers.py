"""Small functions that code imports from `ejkernel.utils`."""

from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.ops.device import current_device
from ejkernel.utils import strides_from_shape

__all__ = [
    "assert_close",
    "get_abs_err",
    "get_err_ratio",
    "get_gpu_arch",
    "get_sharding",
    "get_stride",
    "get_strides",
    "get_tpu_generation",
    "is_fp8",
    "is_hip",
    "narrow",
]


def get_strides(shape: Any) -> tuple[int, ...]:
    """Elements between neighbours along each dimension of a contiguous array, or of an array's shape."""
    return strides_from_shape(getattr(shape, "shape", shape))


def get_stride(shape: Any, index: int = 0) -> int:
    """Elements between neighbours along one dimension."""
    return get_strides(shape)[index]


def get_sharding(arr: Any) -> Any:
    """The sharding of an array; None where it does not say."""
    return getattr(arr, "sharding", None)


def narrow(x: jax.Array, dim: int, start: int, length: int) -> jax.Array:
    """`length` elements of a dimension, from `start` on."""
    return jax.lax.dynamic_slice_in_dim(x, start, length, dim)


def get_abs_err(x: jax.Array, y: jax.Array) -> float:
    """The largest difference."""
    return float(jnp.abs(x.astype(jnp.float32) - y.astype(jnp.float32)).max())


def get_err_ratio(x: jax.Array, y: jax.Array) -> float:
    """Root mean square of the difference divided by that of x."""
    x, y = x.astype(jnp.float32), y.astype(jnp.float32)
    return float(jnp.sqrt(jnp.mean(jnp.square(x - y))) / (jnp.sqrt(jnp.mean(jnp.square(x))) + 1e-8))


def assert_close(
    prefix: str, ref: jax.Array, tri: jax.Array, ratio: float, warning: bool = False, err_atol: float = 1e-6
) -> None:
    """Compares two arrays by the root mean square of their difference.

    Args:
        prefix: Begins the message.
        ref: What is right.
        tri: What is compared.
        ratio: Largest accepted error ratio.
        warning: Whether to warn instead of raising.
        err_atol: Largest absolute error that is always accepted.

    Raises:
        AssertionError: They differ by more.
    """
    error, relative = get_abs_err(ref, tri), get_err_ratio(ref, tri)
    if error <= err_atol or relative < ratio:
        return
    message = f"{prefix}: error ratio {relative:.6f}, largest difference {error:.6f}, wants a ratio below {ratio}"
    if not warning:
        raise AssertionError(message)
    import warnings

    warnings.warn(message, stacklevel=2)


def is_fp8(x: Any) -> bool:
    """Whether an array has eight-bit floats."""
    return jnp.issubdtype(x.dtype, jnp.floating) and jnp.dtype(x.dtype).itemsize == 1


def is_hip() -> bool:
    """Whether the default device is an AMD GPU."""
    return current_device().vendor == "amd"


def get_gpu_arch() -> str:
    """The kind of the default GPU; empty without one."""
    device = current_device()
    return device.kind if device.platform == "gpu" else ""


def get_tpu_generation() -> int | None:
    """The number in the kind of the default TPU, 5 of `"TPU v5e"`; None without one."""
    device = current_device()
    digits = "".join(x for x in device.kind.lower().rpartition("v")[2] if x.isdigit())
    return int(digits) if device.platform == "tpu" and digits else None
