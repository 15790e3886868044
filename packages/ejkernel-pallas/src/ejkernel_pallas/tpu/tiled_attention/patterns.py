"""What a pattern makes of tiles: which it reaches, which it fills, and a drawing of each that is neither.

All of it is computed on the host, once for every pattern and cutting. Equal drawings are kept once, so a pattern that
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
from ejkernel_pallas.tpu.tiled_attention.spec import Spec

FULL, EMPTY = 0, 1
"""Places of the drawings of which every, and no, pair attends."""


@dataclasses.dataclass(frozen=True)
class Drawn:
    """A pattern, cut into tiles.

    Attributes:
        some: Whether a pair attends, bool [H|1, query tiles, key tiles].
        every: Whether all pairs do, likewise.
        places: Which drawing shows a tile, int32, likewise.
        drawings: int8 [drawings, queries of a tile, keys of a tile], 0 beyond the call's last query and key.
    """

    some: Any
    every: Any
    places: Any
    drawings: np.ndarray


def reasons(record: TiledAttention) -> tuple[str, ...]:
    """Why the pattern of a record cannot be cut."""
    pattern, (_, queries, heads, _) = record.pattern, record.query.shape
    if pattern is None or (pattern.shape[0] % queries == 0 and (pattern.heads or heads) % heads == 0):
        return ()
    return (f"pattern of {pattern.shape[0]} queries has no even parts of {queries} queries and {heads} heads",)


def drawn(record: TiledAttention, spec: Spec) -> Drawn | None:
    """The record's part of its pattern; traced where the record is a shard, None without a pattern."""
    pattern, origin = record.pattern, record.dropout_origin
    if pattern is None:
        return None
    found = _drawn(pattern, spec.queries, spec.q_block, spec.kv_block)
    which = np.array(pattern.which if isinstance(pattern, MultiHeadMask) else (0,))
    if origin is None:
        parts: Any = (which[: spec.heads], 0)
        return dataclasses.replace(found, some=found.some[parts], every=found.every[parts], places=found.places[parts])
    if which.size > 1:
        which = jnp.asarray(which)[origin[1] + jnp.arange(spec.heads, dtype=jnp.int32)]
    parts = (which, origin[2] // spec.queries)
    some, every, places = (jnp.asarray(x)[parts] for x in (found.some, found.every, found.places))
    return Drawn(some, every, places, found.drawings)


@functools.lru_cache(maxsize=16)
def _drawn(pattern: Mask, queries: int, q_block: int, kv_block: int) -> Drawn:
    """Of every different head and every part of so many queries: tables are [heads, parts, query tiles, key tiles]."""
    heads = pattern.distinct if isinstance(pattern, MultiHeadMask) else (pattern,)
    whole = np.ones((q_block, kv_block), np.int8)
    drawings = {whole.tobytes(): FULL, np.zeros_like(whole).tobytes(): EMPTY}
    starts = np.arange(0, pattern.shape[0], queries)
    rows, columns = _spans(starts, queries, q_block), _spans(np.zeros(1, int), pattern.shape[1], kv_block)
    found = [mask.tiles(rows, columns) for mask in heads]
    some, every = np.stack([x.some for x in found]), np.stack([x.every for x in found])
    places = np.where(every, FULL, EMPTY)
    with jax.ensure_compile_time_eval():
        for n, i, j in np.argwhere(some & ~every):
            queries_of, keys_of = (range(x.low[k], x.high[k] + 1) for x, k in ((rows, i), (columns, j)))
            shown = _drawing(heads[n], queries_of, keys_of, whole.shape)
            places[n, i, j] = drawings.setdefault(shown.tobytes(), len(drawings))
    made = np.stack([np.frombuffer(x, np.int8).reshape(whole.shape) for x in drawings])
    shape = (len(heads), starts.size, tiles(queries, q_block), tiles(pattern.shape[1], kv_block))
    return Drawn(some.reshape(shape), every.reshape(shape), places.astype(np.int32).reshape(shape), made)


def _spans(starts: np.ndarray, length: int, block: int) -> Spans:
    """First and last index of the tiles of parts of a length."""
    low = (starts[:, None] + np.arange(0, length, block)).reshape(-1)
    return Spans(low, np.minimum(low + block, np.repeat(starts + length, tiles(length, block))) - 1)


def _drawing(mask: Mask, queries: range, keys: range, shape: tuple[int, int]) -> np.ndarray:
    shown = np.zeros(shape, np.int8)
    shown[: len(queries), : len(keys)] = np.asarray(mask.allowed(queries.start, keys.start, (len(queries), len(keys))))
    return shown
