"""The running softmax of an item's rows: a chunk of keys taken in, and what comes out at the end."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from ejkernel_pallas.tpu.mosaic.division import divide
from ejkernel_pallas.tpu.mosaic.loops import each, loop
from ejkernel_pallas.tpu.paged_attention.copies import Item
from ejkernel_pallas.tpu.paged_attention.keys import Chunk, order, turns
from ejkernel_pallas.tpu.paged_attention.spec import LANES, LOG2E, ROWS, TILE, Spec
from ejkernel_pallas.tpu.tiled_attention import tile

Refs = dict[str, Any]
NEVER = 2**30
"""No token of a tile."""
TURNS = 2
"""Arrays that take turns in what is written down of parts."""
SLICE = 64
"""Rows of a large product whose sums are faded before the next."""


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


Mask = Callable[[list[jax.Array]], list[jax.Array]]
"""Makes scores [rows, 128] of pairs that do not attend -inf, in one group of lanes after another."""


class Part(NamedTuple):
    """Rows of a head, and what gives its keys [n, D], its values [n, Dv], and its masked scores, as in `masks`."""

    head: Any
    rows: Rows
    keys: Callable[[], jax.Array]
    values: Callable[[], jax.Array]
    mask: Mask | None


def begin(refs: Refs, head: Any, count: int) -> None:
    """The state of a head's first rows before any key: the sink, which is a key without a value."""
    place = (head, pl.ds(0, count), slice(None))
    peak, total = refs["peak"], refs["total"]
    if "sinks" in refs:
        peak[place] = refs["sinks"][place]
        total[place] = jnp.full((count, LANES), 1.0 / LANES, jnp.float32)
    else:
        peak[place] = jnp.full((count, LANES), -jnp.inf, jnp.float32)
        total[place] = jnp.zeros((count, LANES), jnp.float32)
    refs["sum"][place] = jnp.zeros((count, refs["sum"].shape[2]), jnp.float32)


def note_hidden(refs: Refs, item: Item, chunks: list[Chunk], spec: Spec) -> None:
    """Writes down what is added to scores of chunks by items that have one token: -inf to those of other keys."""

    def one(n: Any) -> None:
        at = chunks[0]._replace(key=chunks[0].key + n * spec.chunk)
        there, _ = _there(refs, item, at, spec)
        refs["hidden"][pl.ds(n, 1), :] = jnp.where(there, 0.0, -jnp.inf)

    each(len(chunks), one)


def _there(refs: Refs, item: Item, at: Chunk, spec: Spec) -> tuple[jax.Array, jax.Array]:
    """Which keys of a chunk any row attends, bool [1, n], and which they are."""
    offset, _ = order(lax.broadcasted_iota(jnp.int32, (1, at.size * spec.joined), 1), at.size, spec)
    inside = (offset >= at.low - at.key) & (offset < at.high - at.key)
    return inside & (_absent(refs, item, at, offset, spec) == 0), offset


def masks(refs: Refs, item: Item, rows: Rows, at: Chunk, n: int, spec: Spec) -> Mask | None:
    """What masks the scores of the chunk that is number n; None where all pairs attend.

    It is asked for every head, whose registers would not hold masks for each other.
    """
    lanes = range(0, at.size * spec.joined, LANES)
    if not at.masked and spec.joined == 1:
        return None
    made: dict[int, Any] = {}
    if spec.joined > 1:
        for start in lanes:  # heads follow each other in the same order in all groups of lanes of one place in words
            made.setdefault(_first_head(start, at, spec), _own(rows, start, at, spec))
    if spec.limits:
        made = {place: _limit(refs, place, kept, n) for place, kept in enumerate(made.values())}
    own = [made[_first_head(start, at, spec)] for start in lanes] if made else [None] * len(lanes)
    if not at.masked:
        return lambda scores: list(map(_only, own, scores))
    if spec.tokens == 1:  # the keys from `low` to `high` are then exactly the row's
        hidden = [refs["hidden"].at[n : n + 1, lane : lane + LANES] for lane in lanes]
        return lambda scores: [_only(mine, x) + y[...] for mine, x, y in zip(own, scores, hidden, strict=True)]
    there, offset = _there(refs, item, at, spec)
    key = at.key - rows.position + offset
    first = jnp.where(there, 0 if spec.right is None else key - spec.right, NEVER)
    last = key if spec.left is None else key + spec.left
    bands = list(zip(_by_lane(first), _by_lane(last), strict=True))
    return lambda scores: [_only(_allowed(refs, rows, *x, spec), y) for x, y in zip(bands, scores, strict=True)]


def _only(kept: Any, scores: jax.Array) -> jax.Array:
    """Scores with -inf where a mask has False, or no larger than the limits that memory has; None leaves them."""
    if kept is None:
        return scores
    return jnp.where(kept, scores, -jnp.inf) if isinstance(kept, jax.Array) else jnp.minimum(scores, kept[...])


def _limit(refs: Refs, place: int, kept: jax.Array, n: int) -> Any:
    """Where memory has a mask as limits of scores, written down before the first chunk; it is the same for all."""
    limit = refs["limits"].at[place]
    if n == 0:
        limit[...] = jnp.where(kept, jnp.inf, -jnp.inf)
    return limit


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
    return divide(row, group) == head


def _absent(refs: Refs, item: Item, at: Chunk, offset: jax.Array, spec: Spec) -> jax.Array:
    """Which keys of a chunk are in pages that are not there, int32."""
    slots, first = spec.cache.slots, divide(at.key, spec.cache.slots)

    def page(k: jax.Array, found: jax.Array) -> jax.Array:
        number = refs["tables"][item.sequence * spec.entries + jnp.minimum(first + k, spec.entries - 1)]
        start = (first + k) * slots - at.key
        inside = (offset >= start) & (offset < start + slots)
        return found + jnp.where(inside, (number < 0).astype(jnp.int32), 0)

    count = jnp.where(item.holes != 0, at.size // slots + 2, 0)
    return loop(jnp.int32(0), count, page, jnp.zeros(offset.shape, jnp.int32))


def _allowed(refs: Refs, rows: Rows, first: jax.Array, last: jax.Array, spec: Spec) -> jax.Array:
    """Which pairs of one group of lanes attend: of the first and the last token of the tile that attend each key."""
    shape = (rows.number, LANES)
    place = refs["places"][rows.span, :]
    kept = place >= jnp.broadcast_to(first, shape)
    return kept if spec.left is None else kept & (place <= jnp.broadcast_to(last, shape))


def fold(refs: Refs, parts: list[Part], lead: int, spec: Spec) -> None:
    """Takes keys into the softmax of rows, part after part; the scores of so many parts ahead are made before.

    Scores, weights and what fades are written down in between, where the compiler would else run out of registers.
    A total is the sum over its lanes. Of items that have one token all lanes are made the same at the end, beside the
    last product, so that less is left to do when no keys are.
    """
    for n in range(len(parts) + lead):
        if n < len(parts):
            _note_scores(refs, parts[n], n, spec)
        if n >= lead:
            _take(refs, parts[n - lead], n - lead, spec)
    for part in parts[-(spec.kv_heads // turns(spec)) :] if spec.tokens == 1 else ():  # one of every head
        place = (part.head, part.rows.span, slice(None))
        total = jnp.sum(refs["total"][place], axis=1, keepdims=True) * (1.0 / LANES)
        refs["total"][place] = jnp.broadcast_to(total, (part.rows.number, LANES))


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
    if part.mask is not None:
        s = jnp.concatenate(part.mask(_by_lane(s)), axis=1)
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
    if part.mask is not None:
        # Rows that have seen nothing yet: exp2(-inf - 0) = 0, not NaN.
        shift = jnp.where(peak == -jnp.inf, 0.0, peak)
    refs["peak"][place] = peak
    fade[...] = jnp.exp2(before - shift)
    found = jnp.exp2(scores[...] - wide(shift, shape[1]))
    refs["total"][place] = fade[...] * refs["total"][place] + functools.reduce(jnp.add, _by_lane(found))
    weights[...] = found.astype(spec.weights)
    _add(refs, part, fade, _product(weights[...], value, (1, 0), spec.weights, spec))


def _add(refs: Refs, part: Part, fade: Any, step: jax.Array) -> None:
    """Fades the sums of a part's rows, and adds to them.

    Those of a large product are written where the compiler does not know that they were read. So it fades the next only
    when it has these: all at once, it would fade some forty long before there is something to add, and spill them.
    """
    number = part.rows.number
    size, same = (number, 0) if number <= ROWS else (SLICE, refs["spans"][0])  # the first part begins at item 0
    for start in range(0, number, size):
        end = min(start + size, number)
        span = pl.ds(part.rows.start + start, end - start)
        faded = wide(fade[start:end], step.shape[1]) * refs["sum"][part.head, span, :]
        refs["sum"][part.head + same, span, :] = faded + step[start:end]


def finish(refs: Refs, head: Any, rows: Rows, spec: Spec) -> None:
    """Output and lse of rows, into the buffers that leave."""
    peak = refs["peak"][head, rows.span, :]
    total = refs["total"][head, rows.span, :]
    same = spec.tokens == 1
    total = total * LANES if same else jnp.broadcast_to(jnp.sum(total, axis=1, keepdims=True), peak.shape)
    # The peak has a weight of 1. A row that has seen nothing has a total and sums of 0, and a peak of -inf.
    total = jnp.maximum(total, 1.0)
    lse = (peak + jnp.log2(total)) * (1.0 / LOG2E)
    factor = spec.value_scale / total
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
