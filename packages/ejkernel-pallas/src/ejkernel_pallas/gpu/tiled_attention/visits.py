"""Which key tiles a query tile visits and which of them need no masking, as small tables that the kernels read.

For every tile the extremes of its indices and segment ids decide: a pair of tiles is *empty* when no query of it can
see any key, and *full* when every query sees every key. Without segment ids the tables are constants.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel_pallas.gpu.tiled_attention.spec import Spec

MIXED = 2**30
"""Added to the last key of queries whose keys are not one after the other."""
Ids = tuple[jax.Array, jax.Array] | None


def key_visits(spec: Spec, ids: Ids, q_block: int, kv_block: int) -> Any:
    """For every query tile the key tiles to visit: int32 [B|1, query tiles, 4], as `_runs` gives them."""
    some, every = _pairs(spec, ids, q_block, kv_block)
    return _runs(some, every, np if ids is None else jnp)


def query_visits(spec: Spec, ids: Ids, q_block: int, kv_block: int) -> Any:
    """For every key tile the query tiles to visit: int32 [B|1, key tiles, 4]."""
    some, every = _pairs(spec, ids, q_block, kv_block)
    return _runs(some.swapaxes(1, 2), every.swapaxes(1, 2), np if ids is None else jnp)


def key_ranges(spec: Spec, ids: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
    """The keys that queries may attend to where there are segment ids.

    Where the ids of a row's keys are in order, with padding before or after them, the keys of a segment are one after
    the other, and every query has a first and a last key. Elsewhere these are what the band leaves, and ids have to be
    compared.

    Args:
        spec: The kernel's constants.
        ids: Of queries [B, T] and keys [B, S], as `padded_ids` gives them.

    Returns:
        The first and the last key of every query, int32 [B, T]. Where ids have to be compared, `MIXED` is added to
        the last.
    """
    queries, keys = ids
    index = jnp.arange(keys.shape[1], dtype=jnp.int32)
    end = jnp.where(keys >= 0, index + 1, 0).max(axis=1, keepdims=True)
    keys = jnp.where(index < end, keys, jnp.iinfo(jnp.int32).max)
    mixed = (keys[:, 1:] < keys[:, :-1]).any(axis=1)
    # Unrolled, a search is one kernel.
    search = functools.partial(jnp.searchsorted, method="scan_unrolled")
    first, after = (jax.vmap(functools.partial(search, side=side))(keys, queries) for side in ("left", "right"))
    after = jnp.minimum(after, end)
    row = jnp.arange(queries.shape[1], dtype=jnp.int32)
    first = jnp.where(mixed[:, None], 0, first)
    last = jnp.where(mixed[:, None], spec.keys, after) - 1
    first = first if spec.left is None else jnp.maximum(first, row - spec.left)
    last = last if spec.right is None else jnp.minimum(last, row + spec.right)
    return first, jnp.where(mixed[:, None], last + MIXED, last)


def tiles(length: int, block: int) -> int:
    """Tiles that cover a length."""
    return -(-length // block)


def padded_ids(values: jax.Array, block: int, padding: int) -> jax.Array:
    """Segment ids [B, length] up to whole tiles, with one id below zero for everything that attends to nothing."""
    values = jnp.where(values < 0, padding, values.astype(jnp.int32))
    return jnp.pad(values, ((0, 0), (0, -values.shape[1] % block)), constant_values=padding)


def without_padding(x: jax.Array, ids: jax.Array) -> jax.Array:
    """An array [B, length, heads, size] with zeros where ids [B, length] are below zero.

    Padding may hold anything, and a weight of zero times NaN is NaN.
    """
    return jnp.where((ids >= 0)[:, :, None, None], x, 0)


def _pairs(spec: Spec, ids: Ids, q_block: int, kv_block: int) -> tuple[Any, Any]:
    """Whether some and every pair of two tiles attend, both [B|1, query tiles, key tiles]."""
    (q_low, q_high), (k_low, k_high) = _extents(spec.queries, q_block), _extents(spec.keys, kv_block)
    some = np.ones((1, len(q_low), len(k_low)), bool)
    every = some & (k_low + kv_block <= spec.keys)
    if spec.left is not None:
        some = some & (k_high >= q_low[:, None] - spec.left)
        every = every & (k_low >= q_high[:, None] - spec.left)
    if spec.right is not None:
        some = some & (k_low <= q_high[:, None] + spec.right)
        every = every & (k_high <= q_low[:, None] + spec.right)
    if ids is None:
        return some, every
    (q_low, q_high), (k_low, k_high) = _extremes(ids[0], q_block), _extremes(ids[1], kv_block)
    q_low, q_high, k_low, k_high = q_low[:, :, None], q_high[:, :, None], k_low[:, None], k_high[:, None]
    same = (jnp.maximum(q_low, k_low) <= jnp.minimum(q_high, k_high)) & (jnp.minimum(q_high, k_high) >= 0)
    all_same = (q_low == q_high) & (k_low == k_high) & (q_low == k_low) & (q_low >= 0)
    return some & same, every & all_same


def _extents(length: int, block: int) -> tuple[np.ndarray, np.ndarray]:
    """First and last index of every tile."""
    low = np.arange(tiles(length, block)) * block
    return low, np.minimum(low + block, length) - 1


def _extremes(values: jax.Array, block: int) -> tuple[jax.Array, jax.Array]:
    """Smallest and largest id of every tile, [B, tiles], of ids that come in whole tiles."""
    cut = values.reshape(values.shape[0], -1, block)
    return cut.min(axis=-1), cut.max(axis=-1)


def _runs(some: Any, every: Any, xp: Any) -> Any:
    """The span of tiles that have work, `[first, last)`, and the first run of full tiles in it, `[clear, unclear)`.

    Int32 [B|1, tiles, 4]: first, clear, unclear, last. A tile without work visits tile 0, where its mask leaves
    nothing: so everything written is written by the same code. Without full tiles the run is empty and first.
    """
    count = some.shape[-1]
    index = np.arange(count, dtype=np.int32)
    last = xp.maximum(xp.where(some, index + 1, 0).max(axis=-1), 1)
    first = xp.where(some, index, count).min(axis=-1)
    first = xp.where(first == count, 0, first)
    clear = xp.where(every, index, count).min(axis=-1)
    unclear = xp.where(~every & (index > clear[..., None]), index, count).min(axis=-1)
    none = clear == count
    clear, unclear = xp.where(none, first, clear), xp.where(none, first, unclear)
    return xp.stack([first, clear, unclear, last], axis=-1).astype(np.int32)
