"""Debug mode of the mask types, and the value checks it turns on.

Shapes are always checked. Values are checked when that costs nothing (lists and NumPy arrays) and, in debug mode, also
when they lie on a device, because reading those waits for the device. Cumulative lengths are few numbers that decide
what every token attends to, and are read wherever they lie. Traced values are never read.
"""

import os
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

_DEBUG_ENVIRONMENT_VARIABLE = "EJKERNEL_MASK_DEBUG"
_TRUE_WORDS = frozenset({"1", "true", "yes", "on"})

# None follows the environment variable, which is read at every call so that setting it after the import works.
_debug_mode_override: bool | None = None


def get_debug_mode() -> bool:
    """Tells whether mask constructors check the values of device arrays.

    Returns:
        What `set_debug_mode` was last given, else whether `EJKERNEL_MASK_DEBUG` is one of 1, true, yes, on.
    """
    if _debug_mode_override is not None:
        return _debug_mode_override
    return os.environ.get(_DEBUG_ENVIRONMENT_VARIABLE, "").strip().lower() in _TRUE_WORDS


def set_debug_mode(enabled: bool | None) -> None:
    """Turns debug mode on or off for this process.

    Args:
        enabled: True or False; None goes back to what `EJKERNEL_MASK_DEBUG` says.
    """
    global _debug_mode_override
    _debug_mode_override = None if enabled is None else bool(enabled)


def is_traced(value: Any) -> bool:
    """Tells whether `value` has no numbers yet because a JAX transformation is tracing it."""
    return isinstance(value, Tracer)


def checkable_values(value: Any, wait_for_device: bool = False) -> np.ndarray | None:
    """Returns the numbers of `value` if they may be read now, else None (see the module's rule).

    Args:
        value: An array, or what can be made one.
        wait_for_device: Whether a device is waited for outside of debug mode too.
    """
    parts = jax.tree.leaves(value)
    if not parts or any(is_traced(part) or isinstance(part, jax.ShapeDtypeStruct) for part in parts):
        return None
    may_block = wait_for_device or get_debug_mode()
    if any(isinstance(part, jax.Array) and not (may_block and part.is_fully_addressable) for part in parts):
        return None
    return np.asarray(value)


def check_cu_seqlens_values(name: str, value: Any, max_len: int | None = None) -> None:
    """Raises ValueError if readable `value` is not 0 = c0 <= c1 <= ... <= cN (<= `max_len` if given)."""
    values = checkable_values(value, wait_for_device=True)
    if values is None or values.size == 0 or values.ndim != 1:
        return
    if values[0] != 0:
        raise ValueError(f"{name} must start with 0, got {values[0]}")
    if (np.diff(values) < 0).any():
        raise ValueError(f"{name} must not decrease, got {values.tolist()}")
    if max_len is not None and values[-1] > max_len:
        raise ValueError(
            f"{name} ends at {values[-1]}, but the row it describes is only {max_len} long; "
            "the length is that of the whole row, not of its longest sequence"
        )


def check_mask_values(name: str, value: Any) -> None:
    """Raises ValueError if a readable floating mask has values other than 0 and 1, as an additive bias has."""
    values = checkable_values(value)
    if values is None or not jnp.issubdtype(values.dtype, jnp.floating):
        return
    if not np.isin(values, (0, 1)).all():
        raise ValueError(
            f"{name} must hold only 0 and 1 (1 attends); it looks like an additive bias, which belongs in bias="
        )


def check_left_aligned(name: str, value: Any) -> None:
    """Raises ValueError if a readable validity mask has padding before a valid token, which lengths cannot express."""
    values = checkable_values(value)
    if values is None or values.ndim != 2:
        return
    valid = values != 0
    if (valid[:, 1:] & ~valid[:, :-1]).any():
        raise ValueError(f"{name} has padding before a valid token; lengths describe only tokens at the front of a row")
