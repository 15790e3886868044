"""Which key tiles a query tile visits and which of them need no masking, as small tables that the kernels read.

For every tile the extremes of its indices and segment ids decide: a pair of tiles is *empty* when no query of it can
see any key, and *full* when every query sees every key. Without segment ids the tables are constants.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel_pallas.gpu.tiled_attention.spec import Spec

Ids = tuple[jax.Array, jax.Array] | None


def key_visits(spec: Spec, ids: Ids, q_block: int, kv_block: int) -> Any:
    """For every query tile the key tiles to visit: int32 [B|1, query tiles, 4], as `_runs` gives them."""
    some, every = _pairs(spec, ids, q_block, kv_block)
    return _runs(some, every, np if ids is None else jnp)


def query_visits(spec: Spec, ids: Ids, q_block: int, kv_block: int) -> Any:
    """For every key tile the query tiles to visit: int32 [B|1, key tiles, 4]."""
    some, every = _pairs(spec, ids, q_block, kv_block)
    return _runs(some.swapaxes(1, 2), every.swapaxes(1, 2), np if ids is None else jnp)


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
