"""What all kernels do with a chunk of a tile: scores, masks and dropout.

tile pair (block_q x block_kv)          one chunk = one product
+-------+-------+-------+               buffer 0   buffer 1
| c0    | c1    | c2    |  q_chunk      c0         c1
+-------+-------+-------+               c2         c3      ...
| c3    | c4    | c5    |               chunks alternate between two buffers, so that the compiler can
+-------+-------+-------+               overlap the product of one with the softmax of the other
 kv_chunk
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ejkernel_pallas.tpu.mosaic.launch import Ref
from ejkernel_pallas.tpu.mosaic.vectors import LANES, SUBLANES, column, product, widen
from ejkernel_pallas.tpu.tiled_attention.refs import TileRefs
from ejkernel_pallas.tpu.tiled_attention.spec import LOWEST, Spec
from ejkernel_pallas.tpu.tiled_attention.visits import MASKED, WORK, entry_at, key_tile, query_tile

Distinct = tuple[bool, bool]
"""Whether batch rows, and heads, have tile pairs of their own."""
DIAGONAL = 256
"""The most queries, and keys, of a product on the diagonal of a query tile, so that little lies beyond it."""
UNROLLED = 2**20
"""Pairs of a tile whose products are laid out one after another; of larger tiles a loop goes through the queries."""


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
        parity: 0 or 1, which of two scratch buffers is the chunk's.
    """

    entry: Any
    query: Any
    queries: int
    key: Any
    keys: int
    masked: bool
    spec: Spec
    parity: int = 0

    @property
    def q(self) -> Any:
        """The queries, in the tile."""
        return pl.ds(self.query, self.queries)

    @property
    def k(self) -> Any:
        """The keys, in the tile."""
        return pl.ds(self.key, self.keys)

    @property
    def shape(self) -> tuple[int, int]:
        """Of the scores."""
        return (self.keys, self.queries) if self.spec.by_key else (self.queries, self.keys)

    def of(self, buffers: tuple[Ref, Ref]) -> Ref:
        """The chunk's part of a scratch double buffer."""
        return buffers[self.parity].at[: self.shape[0], : self.shape[1]]


def visited(table: Any, distinct: Distinct) -> Any:
    """The entry of the step that a kernel is at, whose grid is (batch rows, heads, visits, ...)."""
    b, h, step = (pl.program_id(axis) for axis in range(3))
    return entry_at(table, distinct, b, h, step, (pl.num_programs(1), pl.num_programs(2)))


def visit(entry: Any, spec: Spec, work: Callable[[Chunk], None]) -> None:
    """Calls `work` with every chunk of a tile pair, masked or not as the pair is."""

    @pl.when((entry & (WORK | MASKED)) == WORK)
    def _() -> None:
        _visit_unmasked(entry, spec, work)

    if spec.masks:

        @pl.when((entry & MASKED) != 0)
        def _() -> None:
            for at in _chunks(entry, spec, (spec.q_block, spec.kv_block), masked=True):
                work(at)
    else:
        # Entries are positive: this never runs. The compiler keeps scratch memory that only one block of code uses in
        # registers, of which there are too few, and spills.
        @pl.when(entry < 0)
        def _() -> None:
            for parity in (0, 1):
                work(Chunk(entry, 0, LANES, 0, LANES, False, spec, parity))


def _visit_unmasked(entry: Any, spec: Spec, work: Callable[[Chunk], None]) -> None:
    """Large tiles take the compiler too long unless a loop goes through what the kernel owns."""
    if spec.q_block * spec.kv_block <= UNROLLED:
        for at in _chunks(entry, spec, (spec.q_block, spec.kv_block), masked=False):
            work(at)
        return
    owned, size = ("key", spec.kv_chunk) if spec.by_key else ("query", spec.q_chunk)
    part = (spec.q_block, size) if spec.by_key else (size, spec.kv_block)

    def some(step: Any, carry: None) -> None:
        for at in _chunks(entry, spec, part, masked=False):
            work(at._replace(**{owned: pl.multiple_of(step * size, LANES)}))

    lax.fori_loop(0, (spec.kv_block if spec.by_key else spec.q_block) // size, some, None)


def _chunks(entry: Any, spec: Spec, part: tuple[int, int], masked: bool) -> list[Chunk]:
    """The products of a tile's first queries with its first keys."""
    cut = masked and spec.trapezoid
    q_chunk, kv_chunk = spec.q_chunk, spec.kv_chunk
    if cut and not spec.by_columns and q_chunk > DIAGONAL:
        q_chunk, kv_chunk = math.gcd(q_chunk, DIAGONAL), math.gcd(kv_chunk, DIAGONAL)
    found = [
        Chunk(entry, query, q_chunk, key, kv_chunk, masked, spec)
        for query in range(0, part[0], q_chunk)
        for key in range(0, part[1], kv_chunk)
    ]
    if cut:
        found = [_cut(at) for at in found if at.key < at.query + at.queries]
    return [at._replace(parity=n % 2) for n, at in enumerate(found)]


def _cut(at: Chunk) -> Chunk:
    """A chunk on the diagonal without what lies beyond it: early queries, or late keys."""
    at = at._replace(masked=at.key + at.keys - 1 > at.query)
    if not at.spec.by_columns:
        return at._replace(keys=min(at.keys, -(-(at.query + at.queries - at.key) // LANES) * LANES))
    skipped = max(0, (at.key - at.query) // LANES * LANES)
    return at._replace(query=at.query + skipped, queries=at.queries - skipped)


def load_keys(ref: Any, at: Chunk) -> jax.Array:
    """The chunk's rows of keys or values, 0 beyond the last key."""
    x = ref[at.k, :]
    if not (at.masked and at.spec.ragged_keys):
        return x
    return _zero_from(x, key_tile(at.entry) * at.spec.kv_block + at.key, at.spec.keys)


def load_queries(ref: Any, at: Chunk) -> jax.Array:
    """The chunk's rows of queries or cotangents, 0 beyond the last query."""
    x = ref[at.q, :]
    if not (at.masked and at.spec.ragged_queries):
        return x
    return _zero_from(x, query_tile(at.entry) * at.spec.q_block + at.query, at.spec.queries)


def _zero_from(x: jax.Array, first: Any, end: int) -> jax.Array:
    """Rows from `first` on, with 0 from `end` on: memory beyond an array holds anything, NaN included."""
    index = first + lax.broadcasted_iota(jnp.int32, x.shape, 0)
    return jnp.where(index < end, x, jnp.zeros_like(x))


def scores(refs: TileRefs, key: jax.Array, query: jax.Array, at: Chunk) -> tuple[jax.Array, jax.Array | None]:
    """Scores in powers of two before masking, and the slope of the soft cap."""
    spec, slope = at.spec, None
    pair = (key, query) if spec.by_key else (query, key)
    s = product(*pair, (1, 1), spec.precision)
    if spec.plain:
        return s * spec.factor, None
    s = s * spec.scale
    bias = _of_pairs(refs.bias, refs.bias_of_queries, refs.bias_of_keys, at)
    if bias is not None:
        s = s + bias
    if spec.cap is not None:
        t = jnp.tanh(s * (1.0 / spec.cap))
        s, slope = t * spec.cap, 1.0 - t * t
    if spec.biased:
        return jnp.where(s == -jnp.inf, s, jnp.maximum(s * spec.factor, LOWEST)), slope
    return s * spec.factor, slope


def allowed(refs: TileRefs, at: Chunk) -> jax.Array:
    """Which pairs of a masked chunk attend."""
    spec, conditions = at.spec, []
    if spec.left is not None or spec.right is not None:
        conditions += _in_band(refs, at)
    if refs.q_ids is not None:
        q_ids, k_ids = of_query(refs.q_ids, at), of_key(refs.k_ids, at)
        conditions += [q_ids == k_ids, q_ids >= 0]
    for rectangle, queries, keys in ((refs.mask, refs.mask_of_queries, refs.mask_of_keys), (refs.pattern, None, None)):
        mask = _of_pairs(rectangle, queries, keys, at)
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


def apply_mask(x: jax.Array, instead: float, refs: TileRefs, at: Chunk) -> jax.Array:
    """Scores or weights of a masked chunk, with another number where pairs do not attend."""
    late = at.key + at.keys - at.query
    if not (at.spec.trapezoid and at.spec.by_columns and late < at.queries):
        return jnp.where(allowed(refs, at), x, instead)
    axis = 1 if at.spec.by_key else 0
    first, rest = jnp.split(x, [late], axis=axis)  # queries from there on see all keys of the chunk
    return jnp.concatenate([jnp.where(allowed(refs, at._replace(queries=late)), first, instead), rest], axis=axis)


def double_buffer(shape: tuple[int, int], dtype: Any) -> tuple[Any, Any]:
    """Scratch memory for scores or weights of chunks, which registers would not hold: two arrays that alternate.

    Two, and not one of twice the size: in one array the writes of a chunk would wait for the reads of the one before.
    """
    return pltpu.VMEM(shape, dtype), pltpu.VMEM(shape, dtype)


def dropout_scratch(spec: Spec) -> dict[str, Any]:
    """Scratch memory for dropout's hash keys of what a kernel owns."""
    owned = spec.kv_block if spec.by_key else spec.q_block
    return {} if spec.threshold is None else {"dropout_column": pltpu.VMEM((owned, LANES), jnp.int32)}


def transpose_dropout_keys(refs: TileRefs, spec: Spec) -> None:
    """Copies dropout's hash keys of what a kernel owns from lanes to sublanes, where scores have it."""
    if spec.threshold is not None:
        refs.dropout_column[...] = column((refs.column_keys if spec.by_key else refs.row_keys)[...])


def drop(x: jax.Array, refs: TileRefs, at: Chunk) -> jax.Array:
    """x with 0 where dropout drops; kept elements are not scaled."""
    if at.spec.threshold is None:
        return x
    owned, across = (at.k, refs.row_keys[:, at.q]) if at.spec.by_key else (at.q, refs.column_keys[:, at.k])
    drawn = widen(refs.dropout_column[owned, :], at.shape[1]) * across
    # Unsigned comparison in signed arithmetic: both sides with their top bit flipped, the products by their columns.
    return jnp.where(drawn >= jnp.int32(at.spec.threshold - 2**31), x, 0.0)


def of_query(ref: Any, at: Chunk) -> jax.Array:
    """A row [1, block_q]: the chunk's part, to be broadcast against scores."""
    row = _row(ref, at.q)
    return row if at.spec.by_key else widen(column(row), at.keys)


def of_key(ref: Any, at: Chunk) -> jax.Array:
    """A row [1, block_kv]: the chunk's part, to be broadcast against scores."""
    row = _row(ref, at.k)
    return widen(column(row), at.queries) if at.spec.by_key else row


def _row(ref: Any, part: slice) -> jax.Array:
    """A part of a row, in 32 bits: not every chip broadcasts and transposes narrower types."""
    row = ref[:, part]
    return row if row.dtype.itemsize == 4 else row.astype(jnp.float32)


def _in_band(refs: TileRefs, at: Chunk) -> list[jax.Array]:
    spec = at.spec
    if refs.q_positions is not None or refs.k_positions is not None:
        q = _query_index(at) if refs.q_positions is None else of_query(refs.q_positions, at)
        k = _key_index(at) if refs.k_positions is None else of_key(refs.k_positions, at)
        sides = [] if spec.left is None else [k - q >= -spec.left]
        return sides if spec.right is None else [*sides, k - q <= spec.right]
    sides = [] if spec.left is None else [_by_distance(at, jnp.greater_equal, -spec.left)]
    return sides if spec.right is None else [*sides, _by_distance(at, jnp.less_equal, spec.right)]


def _by_distance(at: Chunk, compare: Callable[[Any, Any], jax.Array], bound: int) -> jax.Array:
    """How key minus query compares with a bound for every pair, register by register.

    Every register is the first one plus a constant, which is moved to the bound. The first one depends on the table,
    so no two chunks share a mask, and the compiler does not keep masks in registers from one chunk to the next.
    """
    spec, sign = at.spec, 1 if at.spec.by_key else -1
    corner = key_tile(at.entry) * spec.kv_block + at.key - query_tile(at.entry) * spec.q_block - at.query
    across = [lax.broadcasted_iota(jnp.int32, (SUBLANES, LANES), axis) for axis in (0, 1)]
    first = corner + sign * (across[0] - across[1])
    rows = [
        jnp.concatenate([compare(first, bound - sign * (row - lane)) for lane in range(0, at.shape[1], LANES)], axis=1)
        for row in range(0, at.shape[0], SUBLANES)
    ]
    return jnp.concatenate(rows, axis=0)


def _of_pairs(rectangle: Ref, queries: Ref, keys: Ref, at: Chunk) -> jax.Array | None:
    """A bias or mask of the chunk's pairs, in float32, to be broadcast against scores; None without."""
    if rectangle is not None:
        x = rectangle[at.q, at.k].astype(jnp.float32)
        return x.T if at.spec.by_key else x
    if queries is not None:
        return of_query(queries, at)
    return None if keys is None else of_key(keys, at)


def _key_index(at: Chunk) -> jax.Array:
    return key_tile(at.entry) * at.spec.kv_block + at.key + _along(at, key=True)


def _query_index(at: Chunk) -> jax.Array:
    return query_tile(at.entry) * at.spec.q_block + at.query + _along(at, key=False)


def _along(at: Chunk, key: bool) -> jax.Array:
    """Of every pair the index of its key, or query, in the chunk."""
    return lax.broadcasted_iota(jnp.int32, at.shape, 0 if key == at.spec.by_key else 1)
