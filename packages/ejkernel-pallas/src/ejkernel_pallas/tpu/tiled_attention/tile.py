"""What all kernels do with a chunk of a tile: scores, which of them count, and dropout."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from ejkernel_pallas.tpu.tiled_attention.spec import LANES, Spec
from ejkernel_pallas.tpu.tiled_attention.visits import MASKED, WORK, key_tile, query_tile

Refs = dict[str, Any]
DIAGONAL = 256
"""Queries, and keys, of one product on the diagonal of a query tile: small enough that little lies beyond it."""


class Chunk(NamedTuple):
    """A part of a tile pair, as large as one product. Its scores are [queries, keys], or [keys, queries] if `by_key`.

    Attributes:
        entry: The pair's place in the table of visits.
        query: First query, in the tile.
        queries: How many.
        key: First key, in the tile.
        keys: How many.
        masked: Whether some pair may not attend.
        spec: The kernel's constants.
    """

    entry: Any
    query: int
    queries: int
    key: int
    keys: int
    masked: bool
    spec: Spec

    @property
    def q(self) -> slice:
        """The queries, in the tile."""
        return slice(self.query, self.query + self.queries)

    @property
    def k(self) -> slice:
        """The keys, in the tile."""
        return slice(self.key, self.key + self.keys)

    @property
    def shape(self) -> tuple[int, int]:
        """Of the scores."""
        return (self.keys, self.queries) if self.spec.by_key else (self.queries, self.keys)


def visit(entry: Any, spec: Spec, work: Callable[[Chunk], None]) -> None:
    """Calls `work` with every chunk of a tile pair, masked or not as the pair is."""

    @pl.when((entry & (WORK | MASKED)) == WORK)
    def _() -> None:
        for at in _chunks(entry, spec, masked=False):
            work(at)

    if spec.masks:

        @pl.when((entry & MASKED) != 0)
        def _() -> None:
            for at in _chunks(entry, spec, masked=True):
                work(at)


def _chunks(entry: Any, spec: Spec, masked: bool) -> list[Chunk]:
    cut = masked and spec.trapezoid
    q_chunk, kv_chunk = spec.q_chunk, spec.kv_chunk
    if cut and not spec.by_key and q_chunk > DIAGONAL:
        q_chunk, kv_chunk = min(q_chunk, DIAGONAL), min(kv_chunk, DIAGONAL)
    found = [
        Chunk(entry, query, q_chunk, key, kv_chunk, masked, spec)
        for query in range(0, spec.q_block, q_chunk)
        for key in range(0, spec.kv_block, kv_chunk)
    ]
    return [_cut(at) for at in found if at.key < at.query + at.queries] if cut else found


def _cut(at: Chunk) -> Chunk:
    """A chunk on the diagonal without what lies beyond it: late keys of queries, early queries of keys."""
    at = at._replace(masked=at.key + at.keys - 1 > at.query)
    if not at.spec.by_key:
        return at._replace(keys=min(at.keys, -(-(at.query + at.queries - at.key) // LANES) * LANES))
    skipped = max(0, (at.key - at.query) // LANES * LANES)
    return at._replace(query=at.query + skipped, queries=at.queries - skipped)


def product(a: jax.Array, b: jax.Array, contract: tuple[int, int], spec: Spec) -> jax.Array:
    """Product of two matrices over one axis of each, in float32."""
    dims = (((contract[0],), (contract[1],)), ((), ()))
    return lax.dot_general(a, b, dims, precision=spec.precision, preferred_element_type=jnp.float32)


def load_keys(ref: Any, at: Chunk) -> jax.Array:
    """The chunk's rows of keys or values, 0 beyond the last key."""
    x = ref[at.k, :]
    if not (at.masked and at.spec.ragged_keys):
        return x
    index = key_tile(at.entry) * at.spec.kv_block + at.key + lax.broadcasted_iota(jnp.int32, x.shape, 0)
    return jnp.where(index < at.spec.keys, x, jnp.zeros_like(x))


def load_queries(ref: Any, at: Chunk) -> jax.Array:
    """The chunk's rows of queries or cotangents, 0 beyond the last query."""
    x = ref[at.q, :]
    if not (at.masked and at.spec.ragged_queries):
        return x
    index = query_tile(at.entry) * at.spec.q_block + at.query + lax.broadcasted_iota(jnp.int32, x.shape, 0)
    return jnp.where(index < at.spec.queries, x, jnp.zeros_like(x))


def scores(refs: Refs, key: jax.Array, query: jax.Array, at: Chunk) -> tuple[jax.Array, jax.Array | None]:
    """Scores in powers of two before masking, and the slope of the soft cap."""
    spec, slope = at.spec, None
    s = product(key, query, (1, 1), spec) if spec.by_key else product(query, key, (1, 1), spec)
    if spec.plain:
        return s * spec.factor, None
    s = s * spec.scale
    bias = _pairs(refs, "bias", at)
    if bias is not None:
        s = s + bias
    if spec.cap is not None:
        t = jnp.tanh(s * (1.0 / spec.cap))
        s, slope = t * spec.cap, 1.0 - t * t
    return s * spec.factor, slope


def allowed(refs: Refs, at: Chunk) -> jax.Array:
    """Which pairs of a masked chunk attend."""
    spec, conditions = at.spec, []
    if spec.left is not None or spec.right is not None:
        conditions += _in_band(refs, at)
    if "q_ids" in refs:
        q_ids, k_ids = of_query(refs["q_ids"], at), of_key(refs["k_ids"], at)
        conditions += [q_ids == k_ids, q_ids >= 0]
    mask = _pairs(refs, "mask", at)
    if mask is not None:
        conditions.append(mask != 0.0)
    if spec.ragged_keys:
        conditions.append(_key_index(at) < spec.keys)
    if spec.ragged_queries:
        conditions.append(_query_index(at) < spec.queries)
    kept = jnp.broadcast_to(conditions[0], at.shape)
    for condition in conditions[1:]:
        kept = kept & condition
    return kept


def dropped(x: jax.Array, refs: Refs, at: Chunk) -> jax.Array:
    """x with 0 where dropout drops; what is kept is not scaled."""
    if at.spec.threshold is None:
        return x
    drawn = of_query(refs["row_keys"], at) * of_key(refs["column_keys"], at)
    # Unsigned comparison in signed arithmetic: both sides with their top bit flipped.
    return jnp.where((drawn ^ jnp.int32(-(2**31))) >= jnp.int32(at.spec.threshold - 2**31), x, 0.0)


def of_query(ref: Any, at: Chunk) -> jax.Array:
    """What a row [1, queries of the tile] says of the chunk's queries, to be broadcast against scores."""
    row = _row(ref, at.q)
    return row if at.spec.by_key else wide(column(row), at.keys)


def of_key(ref: Any, at: Chunk) -> jax.Array:
    """What a row [1, keys of the tile] says of the chunk's keys, to be broadcast against scores."""
    row = _row(ref, at.k)
    return wide(column(row), at.queries) if at.spec.by_key else row


def _row(ref: Any, part: slice) -> jax.Array:
    """A part of a row, in 32 bits: what there is less of cannot be broadcast and transposed everywhere."""
    row = ref[:, part]
    return row if row.dtype.itemsize == 4 else row.astype(jnp.float32)


def column(row: jax.Array) -> jax.Array:
    """[1, n] as [n, 128], the same in every lane."""
    return jnp.broadcast_to(row, (LANES, row.shape[1])).T


def wide(x: jax.Array, width: int) -> jax.Array:
    """[n, 128], the same in every lane, as [n, width]."""
    return jnp.concatenate([x] * (width // LANES), axis=1)


def _in_band(refs: Refs, at: Chunk) -> list[jax.Array]:
    spec = at.spec
    if "q_positions" in refs or "k_positions" in refs:
        q = of_query(refs["q_positions"], at) if "q_positions" in refs else _query_index(at)
        k = of_key(refs["k_positions"], at) if "k_positions" in refs else _key_index(at)
        distance, corner = k - q, 0
    else:  # distances in a chunk are the same in every tile but for that of its corner, a scalar
        corner = key_tile(at.entry) * spec.kv_block + at.key - query_tile(at.entry) * spec.q_block - at.query
        distance = _along(at, key=True) - _along(at, key=False)
    sides = [] if spec.left is None else [distance >= -spec.left - corner]
    return sides if spec.right is None else [*sides, distance <= spec.right - corner]


def _pairs(refs: Refs, name: str, at: Chunk) -> jax.Array | None:
    """What is known of the chunk's pairs, in float32, to be broadcast against scores."""
    if name in refs:
        x = refs[name][at.q, at.k].astype(jnp.float32)
        return x.T if at.spec.by_key else x
    if name + "_of_queries" in refs:
        return of_query(refs[name + "_of_queries"], at)
    return of_key(refs[name + "_of_keys"], at) if name + "_of_keys" in refs else None


def _key_index(at: Chunk) -> jax.Array:
    return key_tile(at.entry) * at.spec.kv_block + at.key + _along(at, key=True)


def _query_index(at: Chunk) -> jax.Array:
    return query_tile(at.entry) * at.spec.q_block + at.query + _along(at, key=False)


def _along(at: Chunk, key: bool) -> jax.Array:
    """Of every pair the index of its key, or query, in the chunk."""
    return lax.broadcasted_iota(jnp.int32, at.shape, 0 if key == at.spec.by_key else 1)
