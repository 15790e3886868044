"""Expresses one ring step as calls of tiled attention, whose shapes and masks are known when they are traced.

Device i holds queries; the keys of device i - d are here. What the two have to do with each other is one of four kinds:

    full        no causal mask and no window: all queries attend to all keys
    zig-zag     causal: device i of n holds chunks i and 2n - 1 - i, `early` and `late`. Its own step is causal. Half of
                the pairs of every other step attends, in blocks that the diagonal does not cut:

                    keys from a device before       keys from a device after
                             early  late                     early  late
                    early    full                   early
                    late     full                   late     full   full

                (late, early) is full in both, the other block depends on the device. Both go through one call, as two
                batches of half the queries and half the keys, so that every device runs the same program.
    banded      a window by index, parts of equal length: the pairs that attend at distance d are a corner of the block
    positioned  whatever else compares positions: they go along, and the kernel has to honour them

(Liu, Zaharia & Abbeel 2023, arXiv:2310.01889; zig-zag: Llama 3, arXiv:2407.21783, section 3.3.2.)
"""

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax

from ejkernel._collective_calls import call_without_varying_axes
from ejkernel.families.ring_attention.record import RingAttention, as_tiled_attention
from ejkernel.families.ring_attention.schedule import (
    Ring,
    TravellingKeys,
    num_neighbours_with_keys,
    ring_of,
    step_record,
    travelling_keys_of,
)
from ejkernel.families.tiled_attention import TiledAttention, causal_window_bounds
from ejkernel.planning.softmax_merge import PartialAttention

RingKind = Literal["full", "zig-zag", "banded", "positioned"]
Gradients = dict[str, jax.Array]
Distance = Any
"""How many positions before this device the device of the keys is; negative if it comes after. An int, or int32 if it
is traced.
"""


def ring_kind(record: RingAttention, ring: Ring) -> RingKind:
    """Returns which of the four kinds the steps of a record are."""
    if causal_window_bounds(as_tiled_attention(record)) == (None, None):
        return "full"
    by_index = record.q_positions is None and record.kv_positions is None
    plain = by_index and record.bias is None and record.mask is None
    if plain and ring.striped:
        return "zig-zag"
    return "banded" if plain and record.query.shape[1] == record.key.shape[1] else "positioned"


@dataclasses.dataclass(frozen=True)
class RingStep:
    """A step as one call of tiled attention, and what its results belong to.

    Attributes:
        record: The call, without sinks.
        rows: (first, last) of the device's queries that the step computes.
        columns: (first, last) of the present keys that the step reads.
        length: The device's queries.
        keys_present: Whether these keys exist at all, or came around the end of the sequence; a traced bool, or True.
    """

    record: TiledAttention
    rows: tuple[int, int]
    columns: tuple[int, int]
    length: int
    keys_present: Any = True

    def take_query_rows(self, x: jax.Array, axis: int) -> jax.Array:
        """Returns the rows of the step's queries."""
        return lax.slice_in_dim(x, *self.rows, axis=axis)

    def partial_results(self, part: PartialAttention) -> tuple[PartialAttention, ...]:
        """Returns results as attention of all of the device's queries, to merge."""
        output = _pad_axis(part.output, self.rows, self.length, 1)
        lse = _pad_axis(part.lse, self.rows, self.length, 2, -jnp.inf)
        return (PartialAttention(self._value_if_keys_present(output, 0), self._value_if_keys_present(lse, -jnp.inf)),)

    def spread(self, gradients: Gradients, keys: int) -> Gradients:
        """Returns gradients as those of all of the device's queries and of all keys that are here."""
        rows = {"query": (self.rows, self.length), "key": (self.columns, keys), "value": (self.columns, keys)}
        padded_gradients = {name: _pad_axis(x, *rows[name], 1) if name in rows else x for name, x in gradients.items()}
        return {name: self._value_if_keys_present(x, 0) for name, x in padded_gradients.items()}

    def _value_if_keys_present(self, x: jax.Array, absent_value: float) -> jax.Array:
        """Returns x, or `absent_value` where the keys of the step are not present."""
        return x if self.keys_present is True else jnp.where(self.keys_present, x, jnp.asarray(absent_value, x.dtype))


@dataclasses.dataclass(frozen=True)
class ZigzagStep:
    """A zig-zag step with another device's keys: the block that depends on the device, and (late, early), as batches.

    Attributes:
        record: The call, without sinks: twice the batch, half of the queries and of the keys.
        before: Whether the keys' device is before this one; a traced bool.
    """

    record: TiledAttention
    before: jax.Array

    def take_query_rows(self, x: jax.Array, axis: int) -> jax.Array:
        """Returns the rows of the step's queries."""
        first_half, second_half = jnp.split(x, 2, axis)
        return jnp.concatenate([jnp.where(self.before, first_half, second_half), second_half])

    def partial_results(self, part: PartialAttention) -> tuple[PartialAttention, ...]:
        """Returns results as attention of all of the device's queries, to merge."""
        (by_device, shared), (lse_by_device, shared_lse) = jnp.split(part.output, 2), jnp.split(part.lse, 2)
        zero, none = jnp.zeros_like(by_device), jnp.full_like(lse_by_device, -jnp.inf)
        before = self.before
        first = PartialAttention(
            jnp.concatenate([jnp.where(before, by_device, zero), shared], axis=1),
            jnp.concatenate([jnp.where(before, lse_by_device, none), shared_lse], axis=2),
        )
        second = PartialAttention(
            jnp.concatenate([zero, jnp.where(before, zero, by_device)], axis=1),
            jnp.concatenate([none, jnp.where(before, none, lse_by_device)], axis=2),
        )
        return first, second

    def spread(self, gradients: Gradients, keys: int) -> Gradients:
        """Returns gradients as those of all of the device's queries and of all keys that are here."""
        padded_gradients: Gradients = {}
        for name, x in gradients.items():
            by_device, shared = jnp.split(x, 2)
            first_half, second_half = jnp.where(self.before, by_device, 0), jnp.where(self.before, 0, by_device)
            # (late, early) is of the late queries, and of the early keys.
            halves = (first_half, second_half + shared) if name == "query" else (first_half + shared, second_half)
            padded_gradients[name] = jnp.concatenate(halves, axis=1)
        return padded_gradients


def ring_of_steps(record: RingAttention) -> Ring | None:
    """Returns `ring_of(record)`. In a banded ring, keys do not travel from the last device to the first, since their
    distance to the queries would differ.
    """
    ring = ring_of(record)
    if ring is None or ring_kind(record, ring) != "banded":
        return ring
    before, after = num_neighbours_with_keys(record, ring.size)
    return dataclasses.replace(ring, num_before=before, num_after=after)


def local_step(record: RingAttention, ring: Ring, travelling_keys: TravellingKeys) -> RingStep:
    """Returns the step with the keys that the device holds. Local indices order a zig-zag: early is before late."""
    queries, keys = record.query.shape[1], record.key.shape[1]
    if ring_kind(record, ring) in ("zig-zag", "banded"):
        met = dataclasses.replace(as_tiled_attention(record), softmax_aux=None)
    else:
        met = step_record(record, ring, lax.axis_index(ring.axis_name), travelling_keys)
    return RingStep(met, (0, queries), (0, keys), queries)


def step_at_distance(
    record: RingAttention, ring: Ring, distance: Distance, travelling_keys: TravellingKeys
) -> RingStep | ZigzagStep:
    """Returns the step with the keys of the device `distance` places before; of a banded ring, an int."""
    me, queries, keys = lax.axis_index(ring.axis_name), record.query.shape[1], travelling_keys["key"].shape[1]
    kind = ring_kind(record, ring)
    if kind == "zig-zag":
        return _zigzag_step(record, (me - distance) % ring.size < me, travelling_keys)
    if kind == "banded":
        source = me - distance
        return _banded_step(record, int(distance), travelling_keys, (source >= 0) & (source < ring.size))
    met = step_record(record, ring, (me - distance) % ring.size, travelling_keys)
    return RingStep(met, (0, queries), (0, keys), queries)


def abstract_steps(record: RingAttention) -> tuple[TiledAttention, ...]:
    """Returns the shapes of a ring's calls, of each kind of step once, for a kernel to say what it refuses in them."""
    ring = ring_of_steps(record)
    if ring is None:
        return (as_tiled_attention(record),)

    def make(record: RingAttention) -> tuple[TiledAttention, ...]:
        travelling_keys = travelling_keys_of(
            record
        )  # of other devices' keys; the shapes do not depend on whether halves are exchanged
        by_device = dataclasses.replace(
            local_step(record, ring, travelling_keys).record, softmax_aux=record.softmax_aux
        )
        distances = ring.distances if ring_kind(record, ring) == "banded" else ring.distances[:1]
        return by_device, *(step_at_distance(record, ring, distance, travelling_keys).record for distance in distances)

    return jax.eval_shape(lambda record: call_without_varying_axes(make, record), record)


def _zigzag_step(record: RingAttention, before: jax.Array, travelling_keys: TravellingKeys) -> ZigzagStep:
    def pick_halves(x: jax.Array, shared_half_index: int) -> jax.Array:
        halves = jnp.split(x, 2, 1)
        return jnp.concatenate([jnp.where(before, *halves), halves[shared_half_index]])

    loads = {name: pick_halves(x, 0) for name, x in travelling_keys.items()}
    moved = {"query": pick_halves(record.query, 1)}
    if record.q_segment_ids is not None:
        moved["q_segment_ids"] = pick_halves(record.q_segment_ids, 1)
    met = dataclasses.replace(
        as_tiled_attention(record), **loads, **moved, softmax_aux=None, causal=False, sliding_window=None
    )
    return ZigzagStep(met, before)


def _banded_step(record: RingAttention, distance: int, travelling_keys: TravellingKeys, present: jax.Array) -> RingStep:
    """Returns the corner of the block in which pairs attend, whose band has no negative side.

    `-left <= k - q <= right` in the whole is `-(left - shift) <= k - q <= right + shift` of local indices, with
    `shift = distance * length`. Where that leaves out a whole diagonal, a square at the corner has the pairs that are
    left.
    """
    length, (left, right) = record.query.shape[1], causal_window_bounds(as_tiled_attention(record))
    shift = distance * length
    left, right = None if left is None else left - shift, None if right is None else right + shift
    rows = columns = (0, length)
    if left is not None and left < 0:
        size = length + left
        rows, columns, left, right = (0, size), (length - size, length), 0, _window_side_in_corner(right, left)
    elif right is not None and right < 0:
        size = length + right
        rows, columns, left, right = (length - size, length), (0, size), _window_side_in_corner(left, right), 0
    size = rows[1] - rows[0]
    window = tuple(None if side is None or side >= size - 1 else side for side in (left, right))
    cut = {name: lax.slice_in_dim(x, *columns, axis=1) for name, x in travelling_keys.items()}
    cut["query"] = lax.slice_in_dim(record.query, *rows, axis=1)
    if record.q_segment_ids is not None:
        cut["q_segment_ids"] = lax.slice_in_dim(record.q_segment_ids, *rows, axis=1)
    unmasked = window == (None, None)
    met = dataclasses.replace(
        as_tiled_attention(record), **cut, softmax_aux=None, causal=False, sliding_window=None if unmasked else window
    )
    return RingStep(met, rows, columns, length, present)


def _window_side_in_corner(window_side: int | None, cut: int) -> int | None:
    """Returns a side of the band within a corner, whose diagonal is `-cut` places further."""
    return None if window_side is None else window_side + cut


def _pad_axis(x: jax.Array, index_range: tuple[int, int], length: int, axis: int, fill: float = 0) -> jax.Array:
    """Returns an axis of `length` with x at an index, and `fill` around it."""
    if index_range == (0, length):
        return x
    padding = [(0, 0)] * x.ndim
    padding[axis] = (index_range[0], length - index_range[1])
    return jnp.pad(x, padding, constant_values=fill)
