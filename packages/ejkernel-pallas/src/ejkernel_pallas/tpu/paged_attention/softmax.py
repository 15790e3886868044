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
from ejkernel_pallas.tpu.paged_attention.quotients import quotient
from ejkernel_pallas.tpu.paged_attention.spec import LANES, LOG2E, Spec

Refs = dict[str, Any]


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
    """Rows of a head, what gives its keys [n, D] and values [n, Dv], and which pairs attend, as of `allowed`."""

    head: Any
    rows: Rows
    keys: Callable[[], jax.Array]
    values: Callable[[], jax.Array]
    kept: list[jax.Array] | None


class Running(NamedTuple):
    """The softmax of rows: peak, in every lane; total, by lane; and sum."""

    peak: jax.Array
    total: jax.Array
    sum: jax.Array


def begin(refs: Refs, count: int) -> None:
    """The state of the first rows before any key: the sink, which is a key without a value."""
    rows = pl.ds(0, count)
    peak, total = refs["peak"], refs["total"]
    heads = peak.shape[0]
    if "sinks" in refs:
        lane = lax.broadcasted_iota(jnp.int32, (heads, count, LANES), 2)
        peak[:, rows, :] = refs["sinks"][:, rows, :]
        total[:, rows, :] = jnp.where(lane == 0, 1.0, 0.0)
    else:
        peak[:, rows, :] = jnp.full((heads, count, LANES), -jnp.inf, jnp.float32)
        total[:, rows, :] = jnp.zeros((heads, count, LANES), jnp.float32)
    refs["sum"][:, rows, :] = jnp.zeros((heads, count, refs["sum"].shape[2]), jnp.float32)


def allowed(refs: Refs, item: Item, rows: Rows, at: Chunk, spec: Spec) -> list[jax.Array] | None:
    """Which pairs of a chunk attend, bool [rows, 128] for one group of lanes after another; None where all do."""
    lanes = range(0, spec.chunk * spec.joined, LANES)
    if not at.masked and spec.joined == 1:
        return None
    made: dict[int, jax.Array] = {}
    if spec.joined > 1:
        for start in lanes:  # heads follow each other in the same order in all groups of lanes of one place in words
            made.setdefault(_first_head(start, spec), _own(rows, start, spec))
    own = [made[_first_head(start, spec)] for start in lanes] if made else [None] * len(lanes)
    if not at.masked:
        return [x for x in own if x is not None]
    offset, _ = order(lax.broadcasted_iota(jnp.int32, (1, spec.chunk * spec.joined), 1), spec)
    there = (offset >= at.low - at.key) & (offset < at.high - at.key) & (_absent(refs, item, at, offset, spec) == 0)
    bands = zip(_by_lane(there.astype(jnp.int32)), _by_lane(offset), own, strict=True)
    return [_allowed(refs, rows, at, *x, spec) for x in bands]


def _first_head(start: int, spec: Spec) -> int:
    """Of the first of a group of lanes."""
    cache = spec.cache
    return start // (spec.chunk * spec.joined // cache.heads_per_unit) if cache.alternates else 0


def _own(rows: Rows, start: int, spec: Spec) -> jax.Array:
    """Which keys are the rows' own head's."""
    shape = (rows.number, LANES)
    _, head = order(start + lax.broadcasted_iota(jnp.int32, shape, 1), spec)
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

    count = jnp.where(item.holes != 0, spec.chunk // slots + 2, 0)
    return loop(jnp.int32(0), count, page, jnp.zeros(offset.shape, jnp.int32))


def _allowed(
    refs: Refs, rows: Rows, at: Chunk, there: jax.Array, offset: jax.Array, own: jax.Array | None, spec: Spec
) -> jax.Array:
    """The same of one group of lanes, of which what is the same for all rows is known."""
    shape = (rows.number, LANES)
    kept = jnp.broadcast_to(there, shape) != 0
    if own is not None:
        kept &= own
    if spec.tokens == 1:
        return kept  # the keys from `low` to `high` are then exactly the row's
    distance = jnp.broadcast_to(at.key + offset, shape) - (rows.position + refs["places"][rows.span, :])
    if spec.left is not None:
        kept &= distance >= -spec.left
    return kept if spec.right is None else kept & (distance <= spec.right)


def fold(refs: Refs, rounds: list[list[Part]], spec: Spec) -> None:
    """Takes chunks of keys into the softmax of rows of some heads, the same in every round.

    Each step is done for all heads before the next, and the scores of all rounds before anything else, so that
    products and reductions, which take their time, overlap: the compiler keeps the order that it is given.
    """
    scores = [[_scores(refs, part, spec) for part in parts] for parts in rounds]
    places = [(x.head, x.rows.span, slice(None)) for x in rounds[0]]
    state = [Running(*(refs[name][place] for name in Running._fields)) for place in places]
    for parts, found in zip(rounds, scores, strict=True):
        state = _updated(state, parts, found, spec)
    for place, running in zip(places, state, strict=True):
        for name, value in running._asdict().items():
            refs[name][place] = value


def _updated(state: list[Running], parts: list[Part], scores: list[jax.Array], spec: Spec) -> list[Running]:
    masked = any(x.kept is not None for x in parts)
    cut = [
        s if x.kept is None else [jnp.where(k, y, -jnp.inf) for k, y in zip(x.kept, s, strict=True)]
        for x, s in zip(parts, map(_by_lane, scores), strict=True)
    ]
    highest = [jnp.max(functools.reduce(jnp.maximum, x), axis=1, keepdims=True) for x in cut]
    peaks = [jnp.maximum(x.peak, y) for x, y in zip(state, highest, strict=True)]
    # Rows that have seen nothing yet: exp2(-inf - 0) = 0, not NaN.
    shifts = [jnp.where(x == -jnp.inf, 0.0, x) for x in peaks] if masked else peaks
    weights = [[jnp.exp2(s - shift) for s in x] for x, shift in zip(cut, shifts, strict=True)]
    steps = [
        _product(jnp.concatenate([y.astype(spec.weights) for y in w], axis=1), x.values(), (1, 0), spec.weights, spec)
        for w, x in zip(weights, parts, strict=True)
    ]
    fades = [jnp.exp2(x.peak - shift) for x, shift in zip(state, shifts, strict=True)]
    return [
        Running(peak, fade * x.total + functools.reduce(jnp.add, w), wide(fade, step.shape[1]) * x.sum + step)
        for x, peak, fade, w, step in zip(state, peaks, fades, weights, steps, strict=True)
    ]


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
    row, lane = (lax.broadcasted_iota(jnp.int32, x.shape, axis) for axis in (0, 1))
    start = start if isinstance(start, int) else pl.multiple_of(start, LANES)
    ref[(*place, slice(None), pl.ds(start, LANES))] = jnp.sum(jnp.where(row == lane, x, 0.0), axis=0, keepdims=True)


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
