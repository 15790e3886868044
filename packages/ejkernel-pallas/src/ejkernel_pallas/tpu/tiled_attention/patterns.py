"""The block map of a pattern: which tiles are full, partial and empty, and the mask of each partial tile.

All of it is computed on the host, once for every pattern and tiling. Equal masks are kept once, so a pattern that
repeats itself, such as a band, has few. A record that is one shard of a call looks its own part up.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.families.tiled_attention import TiledAttention
from ejkernel.planning.tile_pairs import tiles
from ejkernel.types.sparse_masks import Mask, MultiHeadMask, Spans
from ejkernel_pallas.tpu.tiled_attention.spec import TiledSpec

FULL, EMPTY = 0, 1
"""Places of the partial_masks of which every, and no, pair attends."""


@dataclasses.dataclass(frozen=True)
class PatternTiles:
    """A pattern, cut into tiles.

    Attributes:
        nonempty: Which tiles have a pair that attends, bool [H|1, query tiles, key tiles].
        full: Which tiles have no other, of the same shape.
        mask_index: Which of `partial_masks` is a tile's, int32 of the same shape.
        partial_masks: int8 [masks, queries of a tile, keys of a tile], 0 beyond the call's last query and key.
    """

    nonempty: Any
    full: Any
    mask_index: Any
    partial_masks: np.ndarray


def reasons(record: TiledAttention) -> tuple[str, ...]:
    """Why the pattern of a record cannot be cut."""
    pattern, (_, queries, heads, _) = record.pattern, record.query.shape
    if pattern is None or (pattern.shape[0] % queries == 0 and (pattern.heads or heads) % heads == 0):
        return ()
    return (f"pattern of {pattern.shape[0]} queries has no even parts of {queries} queries and {heads} heads",)


def pattern_tiles(record: TiledAttention, spec: TiledSpec) -> PatternTiles | None:
    """The record's part of its pattern; traced where the record is a shard, None without a pattern."""
    pattern, origin = record.pattern, record.dropout_origin
    if pattern is None:
        return None
    found = _cut_pattern(pattern, spec.queries, spec.block_q, spec.block_kv)
    which = np.array(pattern.which if isinstance(pattern, MultiHeadMask) else (0,))
    if origin is None:
        parts: Any = (which[: spec.heads], 0)
        return dataclasses.replace(
            found, nonempty=found.nonempty[parts], full=found.full[parts], mask_index=found.mask_index[parts]
        )
    if which.size > 1:
        which = jnp.asarray(which)[origin[1] + jnp.arange(spec.heads, dtype=jnp.int32)]
    parts = (which, origin[2] // spec.queries)
    some, every, mask_index = (jnp.asarray(x)[parts] for x in (found.nonempty, found.full, found.mask_index))
    return PatternTiles(some, every, mask_index, found.partial_masks)


@functools.lru_cache(maxsize=16)
def _cut_pattern(pattern: Mask, queries: int, block_q: int, block_kv: int) -> PatternTiles:
    """Cuts a pattern into tiles, for each distinct head and shard: tables [heads, shards, query tiles, key tiles]."""
    heads = pattern.distinct if isinstance(pattern, MultiHeadMask) else (pattern,)
    whole = np.ones((block_q, block_kv), np.int8)
    partial_masks = {whole.tobytes(): FULL, np.zeros_like(whole).tobytes(): EMPTY}
    starts = np.arange(0, pattern.shape[0], queries)
    rows, columns = _spans(starts, queries, block_q), _spans(np.zeros(1, int), pattern.shape[1], block_kv)
    found = [mask.tiles(rows, columns) for mask in heads]
    some, every = np.stack([x.some for x in found]), np.stack([x.every for x in found])
    mask_index = np.where(every, FULL, EMPTY)
    with jax.ensure_compile_time_eval():
        for n, i, j in np.argwhere(some & ~every):
            queries_of, keys_of = (range(x.low[k], x.high[k] + 1) for x, k in ((rows, i), (columns, j)))
            shown = _partial_mask(heads[n], queries_of, keys_of, whole.shape)
            mask_index[n, i, j] = partial_masks.setdefault(shown.tobytes(), len(partial_masks))
    made = np.stack([np.frombuffer(x, np.int8).reshape(whole.shape) for x in partial_masks])
    shape = (len(heads), starts.size, tiles(queries, block_q), tiles(pattern.shape[1], block_kv))
    return PatternTiles(some.reshape(shape), every.reshape(shape), mask_index.astype(np.int32).reshape(shape), made)


def _spans(starts: np.ndarray, length: int, block: int) -> Spans:
    """First and last index of each tile, for parts of a given length."""
    low = (starts[:, None] + np.arange(0, length, block)).reshape(-1)
    return Spans(low, np.minimum(low + block, np.repeat(starts + length, tiles(length, block))) - 1)


def _partial_mask(mask: Mask, queries: range, keys: range, shape: tuple[int, int]) -> np.ndarray:
    shown = np.zeros(shape, np.int8)
    shown[: len(queries), : len(keys)] = np.asarray(mask.allowed(queries.start, keys.start, (len(queries), len(keys))))
    return shown
