"""The running softmax of an item's rows: its update with a chunk of keys, and its end."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from ejkernel_pallas.tpu.mosaic.division import divide
from ejkernel_pallas.tpu.mosaic.launch import Ref
from ejkernel_pallas.tpu.mosaic.loops import each, loop
from ejkernel_pallas.tpu.mosaic.vectors import LANES, lane_groups, lane_row, product, widen
from ejkernel_pallas.tpu.paged_attention.copies import Item
from ejkernel_pallas.tpu.paged_attention.keys import Chunk, order, turns
from ejkernel_pallas.tpu.paged_attention.refs import PagedRefs, Staged
from ejkernel_pallas.tpu.paged_attention.spec import LOG2E, ROWS, Spec
from ejkernel_pallas.tpu.tiled_attention import tile

NEVER = 2**30
"""No token of a tile."""
BUFFERS = 2
"""Arrays that alternate in scratch memory of parts."""
SLICE = 64
"""Rows of a large product whose accumulator is rescaled before the next."""


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


def begin(refs: PagedRefs, head: Any, count: int) -> None:
    """The state of a head's first rows before any key: the sink, which is a key without a value."""
    place = (head, pl.ds(0, count), slice(None))
    if refs.sinks is not None:
        refs.row_max[place] = refs.sinks[place]
        refs.row_sum[place] = jnp.full((count, LANES), 1.0 / LANES, jnp.float32)
    else:
        refs.row_max[place] = jnp.full((count, LANES), -jnp.inf, jnp.float32)
        refs.row_sum[place] = jnp.zeros((count, LANES), jnp.float32)
    refs.acc[place] = jnp.zeros((count, refs.acc.shape[2]), jnp.float32)


def store_key_mask(refs: PagedRefs, item: Item, chunks: list[Chunk], spec: Spec) -> None:
    """Stores the additive mask of chunks, for an item that has one token: -inf where a key is masked."""

    def one(n: Any) -> None:
        at = chunks[0]._replace(key=chunks[0].key + n * spec.chunk)
        there, _ = _there(refs, item, at, spec)
        refs.key_mask[pl.ds(n, 1), :] = jnp.where(there, 0.0, -jnp.inf)

    each(len(chunks), one)


def _there(refs: PagedRefs, item: Item, at: Chunk, spec: Spec) -> tuple[jax.Array, jax.Array]:
    """Which keys of a chunk any row attends, bool [1, n], and which they are."""
    offset, _ = order(lax.broadcasted_iota(jnp.int32, (1, at.size * spec.joined), 1), at.size, spec)
    inside = (offset >= at.low - at.key) & (offset < at.high - at.key)
    return inside & (_absent(refs, item, at, offset, spec) == 0), offset


def masks(refs: PagedRefs, item: Item, rows: Rows, at: Chunk, n: int, spec: Spec) -> Mask | None:
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
        masked = [refs.key_mask.at[n : n + 1, lane : lane + LANES] for lane in lanes]
        return lambda scores: [_only(mine, x) + y[...] for mine, x, y in zip(own, scores, masked, strict=True)]
    there, offset = _there(refs, item, at, spec)
    key = at.key - rows.position + offset
    first = jnp.where(there, 0 if spec.right is None else key - spec.right, NEVER)
    last = key if spec.left is None else key + spec.left
    bands = list(zip(lane_groups(first), lane_groups(last), strict=True))
    return lambda scores: [_only(_allowed(refs, rows, *x, spec), y) for x, y in zip(bands, scores, strict=True)]


def _only(kept: Any, scores: jax.Array) -> jax.Array:
    """Scores with -inf where a mask has False, or no larger than the limits that memory has; None leaves them."""
    if kept is None:
        return scores
    return jnp.where(kept, scores, -jnp.inf) if isinstance(kept, jax.Array) else jnp.minimum(scores, kept[...])


def _limit(refs: PagedRefs, place: int, kept: jax.Array, n: int) -> Any:
    """Where memory has a mask as limits of scores, written down before the first chunk; it is the same for all."""
    limit = refs.limits.at[place]
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


def _absent(refs: PagedRefs, item: Item, at: Chunk, offset: jax.Array, spec: Spec) -> jax.Array:
    """Which keys of a chunk are in pages that are not there, int32."""
    slots, first = spec.cache.slots, divide(at.key, spec.cache.slots)

    def page(k: jax.Array, found: jax.Array) -> jax.Array:
        number = refs.tables[item.sequence * spec.entries + jnp.minimum(first + k, spec.entries - 1)]
        start = (first + k) * slots - at.key
        inside = (offset >= start) & (offset < start + slots)
        return found + jnp.where(inside, (number < 0).astype(jnp.int32), 0)

    count = jnp.where(item.holes != 0, at.size // slots + 2, 0)
    return loop(jnp.int32(0), count, page, jnp.zeros(offset.shape, jnp.int32))


def _allowed(refs: PagedRefs, rows: Rows, first: jax.Array, last: jax.Array, spec: Spec) -> jax.Array:
    """Which pairs of one group of lanes attend: of the first and the last token of the tile that attend each key."""
    shape = (rows.number, LANES)
    place = refs.row_tokens[rows.span, :]
    kept = place >= jnp.broadcast_to(first, shape)
    return kept if spec.left is None else kept & (place <= jnp.broadcast_to(last, shape))


def update_softmax(refs: PagedRefs, parts: list[Part], lead: int, spec: Spec) -> None:
    """Updates the softmax of rows with keys, part after part; scores are computed `lead` parts ahead.

    Scores, weights and alpha go through scratch memory: in registers, of which there are too few, they would spill.
    A row's sum is the sum over the lanes of `row_sum`. Of items that have one token all lanes are made the same at the
    end, beside the last product, so that less is left to do when no keys are.
    """
    for n in range(len(parts) + lead):
        if n < len(parts):
            _store_scores(refs, parts[n], n, spec)
        if n >= lead:
            _take(refs, parts[n - lead], n - lead, spec)
    for part in parts[-(spec.kv_heads // turns(spec)) :] if spec.tokens == 1 else ():  # one of every head
        place = (part.head, part.rows.span, slice(None))
        row_sum = jnp.sum(refs.row_sum[place], axis=1, keepdims=True) * (1.0 / LANES)
        refs.row_sum[place] = jnp.broadcast_to(row_sum, (part.rows.number, LANES))


def staged(rows: int, keys: int, dtype: Any) -> Staged:
    """Scratch memory of parts; `dtype` is that of weights."""
    shapes = ((keys, jnp.float32), (keys, dtype), (LANES, jnp.float32))
    return Staged(*(tile.double_buffer((rows, width), kept) for width, kept in shapes))


def _staged(refs: PagedRefs, rows: int, spec: Spec) -> Staged:
    """Scratch memory of parts of so many rows."""
    if rows == spec.few:
        return refs.few
    assert refs.many is not None  # as there are larger products
    return refs.many


def _slot(buffers: tuple[Ref, Ref], n: int, shape: tuple[int, ...]) -> Ref:
    """Part n's place in its double buffer."""
    (rows, width), ref = shape, buffers[n % BUFFERS]
    return ref.at[pl.ds(n // BUFFERS * rows % ref.shape[0], rows), :width]


def _store_scores(refs: PagedRefs, part: Part, n: int, spec: Spec) -> None:
    s = _scores(refs, part, spec)
    if part.mask is not None:
        s = jnp.concatenate(part.mask(lane_groups(s)), axis=1)
    _slot(_staged(refs, s.shape[0], spec).scores, n, s.shape)[...] = s


def _take(refs: PagedRefs, part: Part, n: int, spec: Spec) -> None:
    """Updates row_max, row_sum and acc of its rows with a part whose scores are in scratch memory."""
    place, value = (part.head, part.rows.span, slice(None)), part.values()
    shape = (part.rows.number, value.shape[0])
    buffers = _staged(refs, part.rows.number, spec)
    scores, weights = (_slot(pair, n, shape) for pair in (buffers.scores, buffers.weights))
    alpha = _slot(buffers.alpha, n, (part.rows.number, LANES))
    before = refs.row_max[place]
    highest = functools.reduce(jnp.maximum, lane_groups(scores[...]))
    shift = row_max = jnp.maximum(before, jnp.max(highest, axis=1, keepdims=True))
    if part.mask is not None:
        # Rows that have seen nothing yet: exp2(-inf - 0) = 0, not NaN.
        shift = jnp.where(row_max == -jnp.inf, 0.0, row_max)
    refs.row_max[place] = row_max
    alpha[...] = jnp.exp2(before - shift)
    found = jnp.exp2(scores[...] - widen(shift, shape[1]))
    refs.row_sum[place] = alpha[...] * refs.row_sum[place] + functools.reduce(jnp.add, lane_groups(found))
    weights[...] = found.astype(spec.weights)
    _accumulate(refs, part, alpha, _product(weights[...], value, (1, 0), spec.weights, spec))


def _accumulate(refs: PagedRefs, part: Part, alpha: Ref, step: jax.Array) -> None:
    """Rescales the accumulator of a part's rows, and adds to it.

    That of a large product is stored at an opaque offset, so that the compiler cannot move the next rescaling before
    this store: it would rescale some forty registers long before there is something to add, and spill them.
    """
    number = part.rows.number
    size, same = (number, 0) if number <= ROWS else (SLICE, refs.spans[0])  # the first part begins at item 0
    for start in range(0, number, size):
        end = min(start + size, number)
        span = pl.ds(part.rows.start + start, end - start)
        rescaled = widen(alpha[start:end], step.shape[1]) * refs.acc[part.head, span, :]
        refs.acc[part.head + same, span, :] = rescaled + step[start:end]


def finish(refs: PagedRefs, head: Any, rows: Rows, spec: Spec) -> None:
    """Output and lse of rows, into the buffers that leave."""
    row_max = refs.row_max[head, rows.span, :]
    row_sum = refs.row_sum[head, rows.span, :]
    same = spec.tokens == 1
    row_sum = row_sum * LANES if same else jnp.broadcast_to(jnp.sum(row_sum, axis=1, keepdims=True), row_max.shape)
    # The maximum has a weight of 1. A row that has seen nothing has row_sum and acc of 0, and a row_max of -inf.
    row_sum = jnp.maximum(row_sum, 1.0)
    lse = (row_max + jnp.log2(row_sum)) * (1.0 / LOG2E)
    factor = spec.value_scale / row_sum
    acc = refs.acc[head, rows.span, :]
    output = refs.output_buffer
    output[rows.slot, head, rows.span, :] = (widen(factor, acc.shape[1]) * acc).astype(output.dtype)
    for start in range(0, rows.number, LANES):
        _as_lanes(refs.lse_buffer, lse[start : start + LANES], (rows.slot, head), rows.start + start)


def _as_lanes(ref: Any, x: jax.Array, place: tuple[Any, ...], start: Any) -> None:
    """Writes [n, 128], the same in every lane, as n lanes of a row, from a lane that is a multiple of 128 on."""
    start = start if isinstance(start, int) else pl.multiple_of(start, LANES)
    ref[(*place, slice(None), pl.ds(start, LANES))] = lane_row(x)


def _scores(refs: PagedRefs, part: Part, spec: Spec) -> jax.Array:
    """Scores in powers of two, before masking."""
    query = refs.query_buffer[part.rows.slot, part.head, part.rows.span, :]
    s = _product(query, part.keys(), (1, 1), spec.operand, spec)
    if spec.cap is None:
        return s * (spec.scale * LOG2E)
    return jnp.tanh(s * (spec.scale / spec.cap)) * (spec.cap * LOG2E)


def _product(a: jax.Array, b: jax.Array, contract: tuple[int, int], dtype: Any, spec: Spec) -> jax.Array:
    """Product of two matrices over one axis of each, in float32; of 16 bits it is exact in one pass."""
    return product(a, b, contract, spec.precision if jnp.dtype(dtype).itemsize == 4 else lax.Precision.DEFAULT)
