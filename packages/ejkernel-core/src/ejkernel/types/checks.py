"""Checks shared by the mask types. Every error names the argument, what it got and what is wanted."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.types.integers import as_array, clamp_to_int32

# The dimensions of every leaf of a MaskInfo. Equal names mean equal sizes; the first leaf to use a name sets its size.
_LEAF_DIMENSIONS: dict[str, tuple[str, ...]] = {
    "q_segment_ids": ("batch", "q_len"),
    "kv_segment_ids": ("batch", "kv_len"),
    "attention_mask": ("batch", "heads or 1", "q_len", "kv_len"),
    "cu_seqlens_q": ("sequences + 1",),
    "cu_seqlens_kv": ("sequences + 1",),
    "q_positions": ("batch", "q_len"),
    "kv_positions": ("batch", "kv_len"),
}
# These serve every row of the batch when their own batch size is 1.
_BROADCAST_OVER_BATCH = frozenset({"attention_mask", "q_positions", "kv_positions"})
_LEAVES_STORED_TOGETHER = (("q_segment_ids", "kv_segment_ids"), ("cu_seqlens_q", "cu_seqlens_kv"))


def is_array(value: Any) -> bool:
    """Tells whether `value` has a shape to check (a leaf may also be a sharding, an axis number or a sentinel)."""
    return isinstance(value, jax.Array | np.ndarray | jax.ShapeDtypeStruct)


def has_values(value: Any) -> bool:
    """Tells whether `value` is an array, traced or not, and not just the shape of one."""
    return isinstance(value, jax.Array | np.ndarray)


def check_leaf_shapes(leaves: Mapping[str, Any]) -> None:
    """Checks that the leaves of one MaskInfo fit each other.

    Args:
        leaves: Leaf by public name; None and things that are not arrays are not checked.

    Raises:
        ValueError: A rank, a size or a dtype does not fit, or only one of two leaves that belong together is given.
    """
    for first, second in _LEAVES_STORED_TOGETHER:
        if (leaves[first] is None) != (leaves[second] is None):
            raise ValueError(f"{first} and {second} must both be arrays or both be None")
    if leaves["cu_seqlens_q"] is not None and leaves["q_segment_ids"] is None:
        raise ValueError(
            "cu_seqlens_q without segment ids does not say how long a row is; use MaskInfo.from_cu_seqlens"
        )
    sizes: dict[str, int] = {}
    for name, dimension_names in _LEAF_DIMENSIONS.items():
        leaf = leaves[name]
        if not is_array(leaf):
            continue
        _check_leaf(name, leaf.shape, dimension_names, sizes)
        if name != "attention_mask" and not jnp.issubdtype(leaf.dtype, jnp.integer):
            raise ValueError(f"{name} must hold integers, got {leaf.dtype} of shape {tuple(leaf.shape)}")


def _check_leaf(name: str, shape: tuple[int, ...], dimension_names: tuple[str, ...], sizes: dict[str, int]) -> None:
    fits = len(shape) == len(dimension_names)
    for dimension, size in zip(dimension_names, shape, strict=False):
        serves_all_rows = dimension == "batch" and size == 1 and name in _BROADCAST_OVER_BATCH
        fits = fits and (serves_all_rows or sizes.setdefault(dimension, size) == size)
    if not fits:
        expected = ", ".join(f"{d}={sizes[d]}" if d in sizes and d != "heads or 1" else d for d in dimension_names)
        raise ValueError(f"{name}: got shape {tuple(shape)}, wants [{expected}]")


def check_rank(name: str, shape: tuple[int, ...], expected: Mapping[int, str]) -> None:
    """Raises ValueError unless the rank of `shape` is a key of `expected` (rank to how that shape is written)."""
    if len(shape) not in expected:
        raise ValueError(f"{name}: got shape {tuple(shape)}, wants {' or '.join(expected.values())}")


def check_choice(name: str, value: Any, choices: tuple[Any, ...]) -> None:
    """Raises ValueError unless `value` is one of `choices`."""
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}, got {value!r}")


def check_static_size(name: str, value: Any, minimum: int = 0) -> int:
    """Returns `value` as an int; raises ValueError unless it is a Python integer of at least `minimum`."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise ValueError(f"{name} must be a Python int because it sets a shape, got {type(value).__name__}")
    if value < minimum:
        raise ValueError(f"{name} must be at least {minimum}, got {value}")
    return int(value)


def check_number(name: str, value: Any, minimum: int) -> None:
    """Raises ValueError unless `value` is one integer, possibly traced; a Python one must be at least `minimum`."""
    if isinstance(value, int | np.integer):
        check_static_size(name, value, minimum)
    elif as_int32_array(name, value).ndim:
        raise ValueError(f"{name}: got shape {jnp.shape(value)}, wants a single number")


def as_int32_array(name: str, value: Any) -> jax.Array:
    """Returns `value` as int32, values beyond it as its ends; raises ValueError for booleans and floats."""
    return jnp.asarray(clamp_to_int32(checked_integers(name, value)))


def checked_integers(name: str, value: Any) -> Any:
    """Returns `value` as an array, NumPy's unless it is JAX's; raises ValueError unless it holds integers."""
    array = as_array(value)
    if not jnp.issubdtype(array.dtype, jnp.integer):
        raise ValueError(f"{name} must hold integers, got {array.dtype} of shape {array.shape}")
    return array


def as_per_row_integers(name: str, value: Any, batch_size: int) -> jax.Array:
    """Returns an int or an int array of shape [] or [batch] as int32 of shape [batch]; raises ValueError for others."""
    array = as_int32_array(name, value)
    if array.shape not in ((), (batch_size,)):
        raise ValueError(f"{name}: got shape {array.shape}, wants a single number or [batch={batch_size}]")
    return jnp.broadcast_to(array, (batch_size,))
