"""What the pairs of `mask_mod` tell a kernel before it runs: in which tiles some pair attends and in which all of them,
and whether the function is just a window, for which kernels have a faster path.

    mask_mod without arrays  --evaluated once per shape-->  a window, or tables of NumPy
    mask_mod with arrays     --its bounds, or all of its pairs, in every pass--->  traced tables
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ejkernel.arithmetic import cdiv
from ejkernel.families.tiled_attention.mask_bounds import bounds_of_tiles
from ejkernel.families.tiled_attention.record import TiledAttention, Window, causal_window_bounds
from ejkernel.types.pair_functions import PairFunction, PairProgram

PAIRS_PER_STEP = 2**22
"""Pairs that are evaluated at once."""

TileShape = tuple[int, int]


def mask_function_as_window(record: TiledAttention) -> TiledAttention:
    """Returns the record with a `mask_mod` that is a causal mask or a window, however it is written, as a window.

    A function without captured arrays is evaluated for all pairs, once for all calls of these lengths.
    """
    function, queries, keys = record.mask_mod, record.query.shape[1], record.key.shape[1]
    index_offsets = (record.q_positions, record.kv_positions, record.dropout_origin)
    if function is None or function.captured or not all(x is None for x in index_offsets):
        return record
    if function.program.inputs_read & {"b", "h"} or not queries or not keys:
        return record
    window = _equal_window(function.program, queries, keys)
    if window is None:
        return record
    return dataclasses.replace(with_window(record, window), mask_mod=None)


def with_window(record: TiledAttention, window: Window) -> TiledAttention:
    """Returns the record with a further window, in place of its causal mask and window."""
    (left, right), (first, last) = causal_window_bounds(record), window
    left = first if left is None else left if first is None else min(left, first)
    right = last if right is None else right if last is None else min(right, last)
    sides = None if (left, right) == (None, None) else (left, right)
    return dataclasses.replace(record, causal=False, sliding_window=sides)


@functools.lru_cache(maxsize=64)
def _equal_window(program: PairProgram, queries: int, keys: int) -> Window | None:
    """Returns (left, right) such that exactly the pairs with `-left <= k - q <= right` attend; None if there is none.

    A side that restricts no pair of these lengths is None.
    """
    with jax.ensure_compile_time_eval():
        count, first, last = map(np.asarray, jax.jit(lambda: _attended_key_spans(program, queries, keys))())
    index, attends = np.arange(queries), count > 0
    if not attends.any():
        return None
    low, high = int((first - index)[attends].min()), int((last - index)[attends].max())
    window_first, window_last = np.maximum(index + low, 0), np.minimum(index + high, keys - 1)
    window_count = np.maximum(window_last - window_first + 1, 0)
    exact = (count == window_count) & (~attends | ((first == window_first) & (last == window_last)))
    if not exact.all():
        return None
    return None if low <= 1 - queries else -low, None if high >= keys - 1 else high


def _attended_key_spans(program: PairProgram, queries: int, keys: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns, for every query, how many keys attend, and the first and the last of them, int32 [queries]."""
    key = jnp.arange(keys, dtype=jnp.int32)
    zero = jnp.zeros((1, 1, 1, 1), jnp.int32)

    def span_of_query(query: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        function = PairFunction(captured=(), program=program)
        pairs = function.of_pairs(zero, zero, query.reshape(1, 1, 1, 1), key.reshape(1, 1, 1, -1))
        pairs = jnp.broadcast_to(pairs.reshape(-1), (keys,))
        first, last = jnp.where(pairs, key, keys).min(), jnp.where(pairs, key, -1).max()
        return jnp.sum(pairs, dtype=jnp.int32), first, last

    return lax.map(span_of_query, jnp.arange(queries, dtype=jnp.int32), batch_size=max(1, PAIRS_PER_STEP // keys))


def tiles_of_mask_function(record: TiledAttention, block: TileShape) -> tuple[Any, Any]:
    """Returns in which tiles `mask_mod` lets some pair attend, and in which all of them.

    Where they are traced and `bounds_of_tiles` has bounds of the function, a tile may be neither empty nor full by its
    bounds although it is.

    Args:
        record: A record with `mask_mod`.
        block: Queries and keys of a tile; the last tiles may end past their arrays.

    Returns:
        Two bool [B|1, H|1, query tiles, key tiles]; NumPy's unless the function has captured arrays or the record is
        one shard of a call.
    """
    function, (batch, queries, heads, _), keys = record.mask_mod, record.query.shape, record.key.shape[1]
    assert function is not None  # the caller looked
    sizes = (batch, heads, queries, keys)
    if function.captured or record.dropout_origin is not None:
        bounds = bounds_of_tiles(function, sizes, block, record.dropout_origin)
        return _classify_tiles(function, sizes, block, record.dropout_origin) if bounds is None else bounds
    return _classify_tiles_once(function.program, sizes, block)


@functools.lru_cache(maxsize=64)
def _classify_tiles_once(
    program: PairProgram, sizes: tuple[int, ...], block: TileShape
) -> tuple[np.ndarray, np.ndarray]:
    with jax.ensure_compile_time_eval():
        function = PairFunction(captured=(), program=program)
        any_attend, all_attend = jax.jit(lambda: _classify_tiles(function, sizes, block, None))()
        return np.asarray(any_attend), np.asarray(all_attend)


def _classify_tiles(
    function: PairFunction, sizes: tuple[int, ...], block: TileShape, origin: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    read, (batch, heads, queries, keys) = function.program.inputs_read, sizes
    rows = (batch if "b" in read else 1, heads if "h" in read else 1)
    shape = (*rows, cdiv(queries, block[0]), cdiv(keys, block[1]))
    offsets = jnp.zeros(4, jnp.int32) if origin is None else origin.astype(jnp.int32)

    def classify_tile(n: jax.Array) -> tuple[jax.Array, jax.Array]:
        row, head, i, j = jnp.unravel_index(n, shape)
        # Past the last query or key, the last one is repeated.
        query = jnp.minimum(i * block[0] + jnp.arange(block[0], dtype=jnp.int32), queries - 1)
        key = jnp.minimum(j * block[1] + jnp.arange(block[1], dtype=jnp.int32), keys - 1)
        indices = (row.reshape(1, 1, 1, 1), head.reshape(1, 1, 1, 1), query[:, None][None, None], key[None, None, None])
        indices = tuple((x + offset).astype(jnp.int32) for x, offset in zip(indices, offsets, strict=True))
        pairs = function.of_pairs(*indices)
        return jnp.any(pairs), jnp.all(pairs)

    tiles = jnp.arange(math.prod(shape), dtype=jnp.int32)
    any_attend, all_attend = lax.map(classify_tile, tiles, batch_size=max(1, PAIRS_PER_STEP // (block[0] * block[1])))
    return any_attend.reshape(shape), all_attend.reshape(shape)
