"""The running softmax of an item's rows: a chunk of keys taken in, and what comes out at the end."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from ejkernel_pallas.tpu.loops import loop
from ejkernel_pallas.tpu.paged_attention.copies import Item
from ejkernel_pallas.tpu.paged_attention.keys import Chunk, order
from ejkernel_pallas.tpu.paged_attention.spec import LANES, LOG2E, TILE, Spec
from ejkernel_pallas.tpu.quotients import quotient
from ejkernel_pallas.tpu.tiled_attention import tile

Refs = dict[str, Any]
NEVER = 2**30
"""No token of a tile."""
TURNS = 2
"""Arrays that take turns in what is written down of parts."""


class Rows(NamedTuple):
    """Query rows of one product.

    Attributes:
        slot: The buffer that the queries are in.
        start: The first row, in the tile.
        number: How many.
        position: Of the tile's first token.
    """

    slot: Any
    start: Any
    number: int
    position: Any

    @property
    def span(self) -> Any:
        """The rows, in the tile."""
        return pl.ds(self.start, self.number)


class Part(NamedTuple):
    """Rows of a head, and what gives its keys [n, D], its values [n, Dv], and which pairs attend, as in `allowed`."""

    head: Any
    rows: Rows
    keys: Callable[[], jax.Array]
    values: Callable[[], jax.Array]
    kept: Callable[[], list[jax.Array]] | None


def begin(refs: Refs, head: Any, count: int) -> None:
    """The state of a head's first rows before any key: the sink, which is a key without a value."""
    place = (head, pl.ds(0, count), slice(None))
    peak, total = refs["peak"], refs["total"]
    if "sinks" in refs:
        peak[place] = refs["sinks"][place]
        total[place] = jnp.where(lax.broadcasted_iota(jnp.int32, (count, LANES), 1) == 0, 1.0, 0.0)
    else:
        peak[place] = jnp.full((count, LANES), -jnp.inf, jnp.float32)
        total[place] = jnp.zeros((count, LANES), jnp.float32)
    refs["sum"][place] = jnp.zeros((count, refs["sum"].shape[2]), jnp.float32)


def allowed(refs: Refs, item: Item, rows: Rows, at: Chunk, spec: Spec) -> Callable[[], list[jax.Array]] | None:
    """What tells which pairs of a chunk attend, bool [rows, 128] for one group of lanes after another; None for all.

    It is asked for every head, whose registers would not hold it for each other.
    """
    lanes = range(0, at.size * spec.joined, LANES)
    if not at.masked and spec.joined == 1:
        return None
    made: dict[int, jax.Array] = {}
    if spec.joined > 1:
        for start in lanes:  # heads follow each other in the same order in all groups of lanes of one place in words
            made.setdefault(_first_head(start, at, spec), _own(rows, start, at, spec))
    own = [made[_first_head(start, at, spec)] for start in lanes] if made else [None] * len(lanes)
    if not at.masked:
        return lambda: [x for x in own if x is not None]
    offset, _ = order(lax.broadcasted_iota(jnp.int32, (1, at.size * spec.joined), 1), at.size, spec)
    there = (offset >= at.low - at.key) & (offset < at.high - at.key) & (_absent(refs, item, at, offset, spec) == 0)
    key = at.key - rows.position + offset
    first = jnp.where(there, 0 if spec.right is None or spec.tokens == 1 else key - spec.right, NEVER)
    last = key if spec.left is None else key + spec.left
    bands = list(zip(_by_lane(first), _by_lane(last), own, strict=True))
    return lambda: [_allowed(refs, rows, *band, spec) for band in bands]


def _first_head(start: int, at: Chunk, spec: Spec) -> int:
    """Of the first of a group of lanes."""
    cache = spec.cache
    return start // (at.size * spec.joined // cache.heads_per_unit) if cache.alternates else 0


def _own(rows: Rows, start: int, at: Chunk, spec: Spec) -> jax.Array:
    """Which keys are the rows' own head's."""
    shape = (rows.number, LANES)
    _, head = order(start + lax.broadcasted_iota(jnp.int32, shape, 1), at.size, spec)
    row, group = lax.broadcasted_iota(jnp.int32, shape, 0), spec.group // spec.joined
    assert head is not None  # as there are several
    return (row >= head * group) & (row < head * group + group)


def _absent(refs: Refs, item: Item, at: Chunk, offset: jax.Array, spec: Spec) -> jax.Array:
    """Which keys of a chunk are in pages that are not there, int32."""
    slots, first = spec.cache.slots, quotient(at.key, spec.cache.slots)

    def page(k: jax.Array, found: jax.Array) -> jax.Array:
        number = refs["tables"][item.sequence * spec.entries + jnp.minimum(first + k, spec.entries - 1)]
        start = (first + k) * slots - at.key
        inside = (offset >= start) & (offset < start + slots)
        return found + jnp.where(inside, (number < 0).astype(jnp.int32), 0)

    count = jnp.where(item.holes != 0, at.size // slots + 2, 0)
    return loop(jnp.int32(0), count, page, jnp.zeros(offset.shape, jnp.int32))


def _allowed(refs: Refs, rows: Rows, first: jax.Array, last: jax.Array, own: jax.Array | None, spec: Spec) -> jax.Array:
    """The same of one group of lanes: of the first and the last token of the tile that attend each key."""
    shape = (rows.number, LANES)
    if spec.tokens == 1:  # the keys from `low` to `high` are then exactly the row's
        kept = jnp.broadcast_to(first, shape) == 0
        return kept if own is None else kept & own
    place = refs["places"][rows.span, :]
    kept = place >= jnp.broadcast_to(first, shape)
    return kept if spec.left is None else kept & (place <= jnp.broadcast_to(last, shape))


def fold(refs: Refs, parts: list[Part], lead: int, spec: Spec) -> None:
    """Takes keys into the softmax of rows, part after part; the scores of so many parts ahead are made before.

    Scores, weights and what fades are written down in between, where the compiler would else run out of registers.
    """
    for n in range(len(parts) + lead):
        if n < len(parts):
            _note_scores(refs, parts[n], n, spec)
        if n >= lead:
            _take(refs, parts[n - lead], n - lead, spec)


def notes(kind: str, rows: int, keys: int, dtype: Any) -> dict[str, Any]:
    """Scratch memory for what is written down of parts."""
    kinds = (("scores", keys, jnp.float32), ("weights", keys, dtype), ("fade", LANES, jnp.float32))
    made: dict[str, Any] = {}
    for name, width, kept in kinds:
        made |= tile.notes(f"{kind}_{name}", (rows, width), kept)
    return made


def _note(refs: Refs, name: str, n: int, shape: tuple[int, ...], spec: Spec) -> Any:
    """Where scratch memory has what is written down of a part."""
    rows, width = shape
    ref = refs[f"{'few' if rows == spec.few else 'many'}_{name}_{n % TURNS}"]
    return ref.at[pl.ds(n // TURNS * rows % ref.shape[0], rows), :width]


def _note_scores(refs: Refs, part: Part, n: int, spec: Spec) -> None:
    s = _scores(refs, part, spec)
    if part.kept is not None:
        cut = zip(part.kept(), _by_lane(s), strict=True)
        s = jnp.concatenate([jnp.where(kept, x, -jnp.inf) for kept, x in cut], axis=1)
    _note(refs, "scores", n, s.shape, spec)[...] = s


def _take(refs: Refs, part: Part, n: int, spec: Spec) -> None:
    """Takes a part whose scores are written down into peak, in every lane, total, by lane, and sum of its rows."""
    place, value = (part.head, part.rows.span, slice(None)), part.values()
    shape = (part.rows.number, value.shape[0])
    scores, weights = (_note(refs, name, n, shape, spec) for name in ("scores", "weights"))
    fade = _note(refs, "fade", n, (part.rows.number, LANES), spec)
    before = refs["peak"][place]
    highest = functools.reduce(jnp.maximum, _by_lane(scores[...]))
    shift = peak = jnp.maximum(before, jnp.max(highest, axis=1, keepdims=True))
    if part.kept is not None:
        # Rows that have seen nothing yet: exp2(-inf - 0) = 0, not NaN.
        shift = jnp.where(peak == -jnp.inf, 0.0, peak)
    refs["peak"][place] = peak
    fade[...] = jnp.exp2(before - shift)
    found = jnp.exp2(scores[...] - wide(shift, shape[1]))
    refs["total"][place] = fade[...] * refs["total"][place] + functools.reduce(jnp.add, _by_lane(found))
    weights[...] = found.astype(spec.weights)
    step = _product(weights[...], value, (1, 0), spec.weights, spec)
    refs["sum"][place] = wide(fade[...], step.shape[1]) * refs["sum"][place] + step


def finish(refs: Refs, head: Any, rows: Rows, spec: Spec) -> None:
    """Output and lse of rows, into the buffers that leave."""
    peak = refs["peak"][head, rows.span, :]
    total = jnp.sum(refs["total"][head, rows.span, :], axis=1, keepdims=True)
    total = jnp.broadcast_to(total, peak.shape)
    some = (total > 0.0) & (peak > -jnp.inf)
    total = jnp.where(some, total, 1.0)
    lse = jnp.where(some, (peak + jnp.log2(total)) * (1.0 / LOG2E), -jnp.inf)
    factor = jnp.where(some, spec.value_scale / total, 0.0)
    sums = refs["sum"][head, rows.span, :]
    output = refs["output_buffer"]
    output[rows.slot, head, rows.span, :] = (wide(factor, sums.shape[1]) * sums).astype(output.dtype)
    for start in range(0, rows.number, LANES):
        _as_lanes(refs["lse_buffer"], lse[start : start + LANES], (rows.slot, head), rows.start + start)


def wide(x: jax.Array, width: int) -> jax.Array:
    """[n, 128], the same in every lane, as [n, width]."""
    if width <= LANES:
        return x[:, :width]
    return jnp.concatenate([x] * -(-width // LANES), axis=1)[:, :width]


def _as_lanes(ref: Any, x: jax.Array, place: tuple[Any, ...], start: Any) -> None:
    """Writes [n, 128], the same in every lane, as n lanes of a row, from a lane that is a multiple of 128 on."""
    sublane, lane = (lax.broadcasted_iota(jnp.int32, (TILE, LANES), axis) for axis in (0, 1))
    folded = x[:TILE]
    for row in range(TILE, x.shape[0], TILE):
        folded = jnp.where(lane >= row, x[row : row + TILE], folded)
    start = start if isinstance(start, int) else pl.multiple_of(start, LANES)
    row = jnp.sum(jnp.where(lane % TILE == sublane, folded, 0.0), axis=0, keepdims=True)
    ref[(*place, slice(None), pl.ds(start, LANES))] = row


def _scores(refs: Refs, part: Part, spec: Spec) -> jax.Array:
    """Scores in powers of two, before masking."""
    query = refs["query_buffer"][part.rows.slot, part.head, part.rows.span, :]
    s = _product(query, part.keys(), (1, 1), spec.operand, spec)
    if spec.cap is None:
        return s * (spec.scale * LOG2E)
    return jnp.tanh(s * (spec.scale / spec.cap)) * (spec.cap * LOG2E)


def _by_lane(x: jax.Array) -> list[jax.Array]:
    return [x[:, lane : lane + LANES] for lane in range(0, x.shape[1], LANES)]


def _product(a: jax.Array, b: jax.Array, contract: tuple[int, int], dtype: Any, spec: Spec) -> jax.Array:
    """Product of two matrices over one axis of each, in float32; of 16 bits it is exact in one pass."""
    dims = (((contract[0],), (contract[1],)), ((), ()))
    precision = spec.precision if jnp.dtype(dtype).itemsize == 4 else lax.Precision.DEFAULT
    return lax.dot_general(a, b, dims, precision=precision, preferred_element_type=jnp.float32)
