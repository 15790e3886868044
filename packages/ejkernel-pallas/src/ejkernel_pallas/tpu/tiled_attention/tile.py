"""What all kernels do with a chunk of a tile: scores, which of them count, and dropout."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ejkernel_pallas.tpu.tiled_attention.spec import LANES, LOWEST, Spec
from ejkernel_pallas.tpu.tiled_attention.visits import MASKED, WORK, entry_at, key_tile, query_tile

Refs = dict[str, Any]
Apart = tuple[bool, bool]
DIAGONAL = 256
"""The most queries, and keys, of a product on the diagonal of a query tile, so that little lies beyond it."""
UNROLLED = 2**20
"""Pairs of a tile whose products are laid out one after another; of larger tiles a loop goes through the queries."""
SUBLANES = 8


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
        turn: 0 or 1 in turns, so that what is kept of a chunk does not wait for the chunk before.
    """

    entry: Any
    query: Any
    queries: int
    key: Any
    keys: int
    masked: bool
    spec: Spec
    turn: int = 0

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


def visited(table: Any, apart: Apart) -> Any:
    """The entry of the step that a kernel is at, whose grid is (batch rows, heads, visits, ...)."""
    b, h, step = (pl.program_id(axis) for axis in range(3))
    return entry_at(table, apart, b, h, step, (pl.num_programs(1), pl.num_programs(2)))


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
        # Entries are positive: this never runs. What scratch memory is for one block of code alone, the compiler
        # dissolves into registers, which it has not, and spills.
        @pl.when(entry < 0)
        def _() -> None:
            for turn in (0, 1):
                work(Chunk(entry, 0, LANES, 0, LANES, False, spec, turn))


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
    return [at._replace(turn=n % 2) for n, at in enumerate(found)]


def _cut(at: Chunk) -> Chunk:
    """A chunk on the diagonal without what lies beyond it: early queries, or late keys."""
    at = at._replace(masked=at.key + at.keys - 1 > at.query)
    if not at.spec.by_columns:
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
    if spec.biased:
        return jnp.where(s == -jnp.inf, s, jnp.maximum(s * spec.factor, LOWEST)), slope
    return s * spec.factor, slope


def allowed(refs: Refs, at: Chunk) -> jax.Array:
    """Which pairs of a masked chunk attend."""
    spec, conditions = at.spec, []
    if spec.left is not None or spec.right is not None:
        conditions += _in_band(refs, at)
    if "q_ids" in refs:
        q_ids, k_ids = of_query(refs["q_ids"], at), of_key(refs["k_ids"], at)
        conditions += [q_ids == k_ids, q_ids >= 0]
    for name in ("mask", "pattern"):
        mask = _pairs(refs, name, at)
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


def hidden(x: jax.Array, instead: float, refs: Refs, at: Chunk) -> jax.Array:
    """What a masked chunk has of every pair, with another number where pairs do not attend."""
    late = at.key + at.keys - at.query
    if not (at.spec.trapezoid and at.spec.by_columns and late < at.queries):
        return jnp.where(allowed(refs, at), x, instead)
    axis = 1 if at.spec.by_key else 0
    first, rest = jnp.split(x, [late], axis=axis)  # queries from there on see all keys of the chunk
    return jnp.concatenate([jnp.where(allowed(refs, at._replace(queries=late)), first, instead), rest], axis=axis)


def notes(name: str, shape: tuple[int, int], dtype: Any) -> dict[str, Any]:
    """Scratch memory for what is written down of chunks because registers would not hold it: an array for each turn.

    In one array for both, the compiler would have what is written of a chunk wait for what is read of the one before.
    """
    return {f"{name}_{turn}": pltpu.VMEM(shape, dtype) for turn in (0, 1)}


def note(refs: Refs, name: str, at: Chunk) -> Any:
    """Where scratch memory has what is written down of a chunk."""
    return refs[f"{name}_{at.turn}"].at[: at.shape[0], : at.shape[1]]


def numbers(spec: Spec) -> dict[str, Any]:
    """Scratch memory for dropout's numbers of what a kernel owns, where scores have it."""
    owned = spec.kv_block if spec.by_key else spec.q_block
    return {} if spec.threshold is None else {"drawn": pltpu.VMEM((owned, LANES), jnp.int32)}


def turn_numbers(refs: Refs, spec: Spec) -> None:
    """Copies dropout's numbers of what a kernel owns, which come as a row, to where scores have it."""
    if spec.threshold is not None:
        refs["drawn"][...] = column(refs["column_keys" if spec.by_key else "row_keys"][...])


def dropped(x: jax.Array, refs: Refs, at: Chunk) -> jax.Array:
    """x with 0 where dropout drops; what is kept is not scaled."""
    if at.spec.threshold is None:
        return x
    owned, met = (at.k, refs["row_keys"][:, at.q]) if at.spec.by_key else (at.q, refs["column_keys"][:, at.k])
    drawn = wide(refs["drawn"][owned, :], at.shape[1]) * met
    # Unsigned comparison in signed arithmetic: both sides with their top bit flipped, the products by their columns.
    return jnp.where(drawn >= jnp.int32(at.spec.threshold - 2**31), x, 0.0)


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
        sides = [] if spec.left is None else [k - q >= -spec.left]
        return sides if spec.right is None else [*sides, k - q <= spec.right]
    sides = [] if spec.left is None else [_by_distance(at, jnp.greater_equal, -spec.left)]
    return sides if spec.right is None else [*sides, _by_distance(at, jnp.less_equal, spec.right)]


def _by_distance(at: Chunk, compare: Callable[[Any, Any], jax.Array], bound: int) -> jax.Array:
    """How key minus query compares with a bound for every pair, register by register.

    All registers are the first but for a number, which is taken from the bound. Where the first is, only a table says:
    so none is the same as in another chunk, and the compiler does not keep them in registers that it has not.
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
