"""Integers that callers pass, brought into the range in which int32 arithmetic of kernels is exact.

Kernels compare `q - left <= k <= q + right` in int32. `POSITION_LIMIT` and `NO_LIMIT` are chosen together: positions
are clamped to `[-2**29, 2**29]`, so two of them differ by at most `2**30`. A side of `2**30` or more bounds nothing,
and neither a difference nor a sum of the two leaves int32.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer

POSITION_LIMIT = 2**29
"""The largest position, and the smallest with a minus sign; one that is further out counts as the limit itself."""

NO_LIMIT = 2**30
"""The largest distance of two positions: a window side or a chunk of so much or more is no limit."""

_INT32 = np.iinfo(np.int32)


def is_int(value: Any) -> bool:
    """Returns whether a value is one integer of Python or NumPy, and no bool."""
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def as_offset(value: Any) -> int:
    """Returns an offset of indices, all of which are smaller than `NO_LIMIT`.

    Raises:
        ValueError: It is no integer.
    """
    check_int("offset", value)
    return max(min(int(value), NO_LIMIT), -NO_LIMIT)


def check_int(name: str, value: Any, least: int | None = None) -> None:
    """Checks that a value is an integer, and at least `least`.

    Raises:
        ValueError: It is not; the message names the argument.
    """
    if not is_int(value) or (least is not None and value < least):
        raise ValueError(f"{name}: got {value!r}, wants an int" + ("" if least is None else f" of at least {least}"))


def as_array(value: Any) -> Any:
    """Returns a value as an array: NumPy's where it is all on the host, since JAX would wrap 64-bit integers around."""
    on_device = any(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(value))
    return jnp.asarray(value) if on_device else np.asarray(value)


def limit_or_none(value: int | None) -> int | None:
    """Returns a window side or a chunk size; None where it is so large that it bounds nothing."""
    return None if value is None or value >= NO_LIMIT else value


def fits_int32(dtype: Any) -> bool:
    """Returns whether int32 holds every value of an integer dtype."""
    return np.can_cast(np.dtype(dtype), np.int32)


def clamp_to_int32(values: Any) -> Any:
    """Returns integers as int32; those outside of its range become its nearest end, where a cast would wrap around.

    Args:
        values: An integer array, traced or not. A NumPy array stays one, since JAX wraps 64-bit integers around.
    """
    if isinstance(values, np.ndarray | np.generic):
        return np.clip(values, *_common_integer_range(values.dtype)).astype(np.int32)
    if values.dtype == jnp.int32:
        return values
    if fits_int32(values.dtype):
        return values.astype(jnp.int32)
    low, high = _common_integer_range(values.dtype)
    return jnp.clip(values, low, high).astype(jnp.int32)


def _common_integer_range(dtype: Any) -> tuple[Any, Any]:
    """Returns the ends of what int32 and another integer dtype both hold, in the latter."""
    info = np.iinfo(dtype)
    ends = (max(int(info.min), _INT32.min), min(int(info.max), _INT32.max))
    return np.dtype(dtype).type(ends[0]), np.dtype(dtype).type(ends[1])


def clamp_positions(values: Any) -> jax.Array:
    """Returns positions as int32 in `[-POSITION_LIMIT, POSITION_LIMIT]`."""
    return jnp.clip(jnp.asarray(clamp_to_int32(values)), -POSITION_LIMIT, POSITION_LIMIT)


def exact_segment_ids(queries: Any, keys: Any) -> tuple[Any, Any]:
    """Returns segment ids as int32 that are equal, and negative, exactly where the given ones are.

    Ids that int32 holds keep their values. If one does not (a 64-bit hash, or an unsigned one from 2**31 on), all are
    numbered anew by their order, over both arrays together. Negative ids are padding, which only signed dtypes have.

    Args:
        queries: Integer array; a NumPy array that holds 64-bit integers is renumbered on the host.
        keys: The same, of any shape; may be `queries` itself.

    Raises:
        ValueError: Only one of the two is on the host and has ids beyond int32; or the ids are traced in `shard_map`,
            whose shards cannot be numbered alike.
    """
    if fits_int32(queries.dtype) and fits_int32(keys.dtype):
        return _cast_to_int32(queries), _cast_to_int32(keys)
    on_host = [isinstance(ids, np.ndarray) for ids in (queries, keys)]
    if all(on_host):
        return _exact_ids_on_host(queries, keys)
    if any(on_host):
        queries, keys = (_as_jax_ids(name, ids) for name, ids in (("q_segment_ids", queries), ("kv_segment_ids", keys)))
    for name, ids in (("q_segment_ids", queries), ("kv_segment_ids", keys)):
        _check_ids_not_sharded(name, ids)
    return _renumber_on_device(queries, keys)


def exact_ids(name: str, ids: Any) -> Any:
    """Returns `exact_segment_ids` of one array.

    Raises:
        ValueError: In the same cases as in `exact_segment_ids`; the message has the argument's name.
    """
    if not fits_int32(ids.dtype) and not isinstance(ids, np.ndarray):
        _check_ids_not_sharded(name, ids)
    return exact_segment_ids(ids, ids)[0]


def _cast_to_int32(ids: Any) -> Any:
    return ids if ids.dtype == np.int32 else ids.astype(np.int32)


def _exact_ids_on_host(queries: np.ndarray, keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns ids in NumPy arrays as int32: their values if int32 holds the largest one, else their ranks; negative ids
    are padding in both.
    """
    everything = [np.unique(ids) for ids in (queries, keys)]
    ends = [int(end) for ids in everything if ids.size for end in (ids[0], ids[-1])]
    if not ends or max(ends) <= _INT32.max:
        narrowed = clamp_to_int32(queries), clamp_to_int32(keys)
    else:
        # The comparison never converts both to a common dtype: NumPy's common dtype of int64 and uint64 is float64.
        known = sorted({int(one) for ids in everything for one in ids if one >= 0})
        number = {one: index for index, one in enumerate(known)}

        def renumbered_ids(ids: np.ndarray) -> np.ndarray:
            values, inverse = np.unique(ids, return_inverse=True)
            return np.array([number.get(int(one), -1) for one in values], np.int32)[inverse].reshape(ids.shape)

        narrowed = renumbered_ids(queries), renumbered_ids(keys)
    return (narrowed[0], narrowed[0]) if queries is keys else narrowed


def _as_jax_ids(name: str, ids: Any) -> jax.Array:
    """Returns ids as a JAX array of the same values.

    Raises:
        ValueError: JAX would wrap them around.
    """
    if isinstance(ids, np.ndarray) and not fits_int32(ids.dtype):
        array = jnp.asarray(ids)
        if (np.asarray(array) != ids).any():
            raise ValueError(
                f"{name}: got a NumPy array of {ids.dtype} with ids that exceed int32, and a JAX array for the others, "
                "wants NumPy arrays for both, or ids within int32"
            )
        return array
    return jnp.asarray(ids)


def _check_ids_not_sharded(name: str, ids: Any) -> None:
    if isinstance(ids, Tracer) and not fits_int32(ids.dtype) and _is_inside_shard_map():
        raise ValueError(
            f"{name}: got {ids.dtype} in shard_map, wants int32: devices would map ids to int32 in different ways; "
            "make the MaskInfo outside of shard_map, or cast the ids to int32"
        )


def _is_inside_shard_map() -> bool:
    mesh: Any = jax.sharding.get_abstract_mesh()
    return bool(getattr(mesh, "manual_axes", ()))


def _renumber_on_device(queries: jax.Array, keys: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Renumbers ids in JAX: the number of an id is its first index among all ids, sorted."""
    bits = 64 if any(np.dtype(ids.dtype).itemsize == 8 for ids in (queries, keys)) else 32
    sides = (queries,) if queries is keys else (queries, keys)
    unsigned = [jnp.where(ids < 0, 0, ids).astype(f"uint{bits}") for ids in sides]
    ordered = jnp.sort(jnp.concatenate([ids.reshape(-1) for ids in unsigned]))
    held = jnp.all(ordered <= _INT32.max)
    numbers = []
    for ids, values in zip(sides, unsigned, strict=True):
        number = jnp.searchsorted(ordered, values, side="left", method="sort").astype(jnp.int32)
        number = jnp.where(held, lax.convert_element_type(values, jnp.int32), number)
        numbers.append(jnp.where(ids < 0, -1, number))
    return numbers[0], numbers[-1]
