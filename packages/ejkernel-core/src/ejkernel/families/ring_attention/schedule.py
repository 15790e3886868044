"""The schedule of a ring: which devices' keys a device receives, and in which order.

Every device starts with the keys it holds. Then they travel from device i to i + 1, so that a device receives those
of the devices *before* it, nearest first, and around the end of the ring those of all others; and from i to i - 1, so
that it receives those of the devices *after* it. A window that reaches only some parts stops both early. Pairs that no
query of a device attends to are left out by the tile loops, from positions alone.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ejkernel.families.ring_attention import stripes
from ejkernel.families.ring_attention.record import (
    RingAttention,
    as_tiled_attention,
    axis_size,
    has_functions,
    origin_of_pairs,
)
from ejkernel.families.tiled_attention import TiledAttention, causal_window_bounds

Tree = TypeVar("Tree")
TravellingKeys = dict[str, jax.Array]
StepFunction = Callable[[jax.Array, TravellingKeys, Any], tuple[TravellingKeys, Any]]

QUERY_AXIS_BY_FIELD = {"query": 1, "q_segment_ids": 1, "bias": 2, "mask": 2}
TRAVELLING_FIELDS = ("key", "value", "kv_segment_ids", "kv_positions")


@dataclasses.dataclass(frozen=True)
class Ring:
    """The ring of one call: its mesh axis and the range of its transfers.

    Attributes:
        axis_name: The mesh axis.
        size: Devices along it.
        num_before: Number of previous devices from which a device receives keys.
        num_after: Number of later devices from which a device receives keys.
        striped: Whether parts are stripes (see `stripes.py`).
    """

    axis_name: str
    size: int
    num_before: int
    num_after: int
    striped: bool

    @property
    def distances(self) -> tuple[int, ...]:
        """Returns how many places before a device each sender is, in the order of ring steps; negative after it."""
        return (*range(1, self.num_before + 1), *range(-1, -self.num_after - 1, -1))

    def shift(self, tree: Tree, hops: int) -> Tree:
        """Returns what the device `hops` places before this one has."""
        pairs = [(i, (i + hops) % self.size) for i in range(self.size)]
        return jax.tree.map(lambda x: lax.ppermute(x, self.axis_name, pairs), tree)

    def stripe(self, x: jax.Array, axis: int) -> jax.Array:
        """Returns x with this device's striped part in place of its own, along an axis."""
        return stripes.stripe(x, axis, self.axis_name) if self.striped else x

    def unstripe(self, x: jax.Array, axis: int) -> jax.Array:
        """Returns the inverse of `stripe`."""
        return stripes.unstripe(x, axis, self.axis_name) if self.striped else x

    def sequence_pieces(self, source: jax.Array, length: int) -> list[tuple[jax.Array, int]]:
        """Returns (start, length) in the whole sequence of each piece that a device works on."""
        if not self.striped:
            return [(source * length, length)]
        return [(start, length // 2) for start in stripes.half_starts(source, length // 2, self.size)]

    def indices(self, source: jax.Array, length: int) -> jax.Array:
        """Returns int32 [1, length], the index in the whole sequence of each row that a device works on."""
        pieces = [jnp.arange(n, dtype=jnp.int32) + start for start, n in self.sequence_pieces(source, length)]
        return jnp.concatenate(pieces)[None]

    def run_ring(
        self, travelling_keys: TravellingKeys, travelling_gradients: TravellingKeys, run_step: StepFunction, state: Any
    ) -> tuple[TravellingKeys, Any]:
        """Sends the keys of all devices around the ring, and runs one step for each device's keys that arrive here.

        Args:
            travelling_keys: This device's keys and what belongs to them.
            travelling_gradients: Zeros for what is collected for each device's keys on their way.
            run_step: (device that the keys are from, keys, state) -> (what it adds to their gradients, state).
            state: What stays here.

        Returns:
            What was collected for this device's keys, back home, and the state.
        """
        after = self.shift(travelling_keys, -1) if self.num_after else travelling_keys
        total, state = self._run_ring_direction(
            1, self.num_before, travelling_keys, travelling_gradients, run_step, state, first=0
        )
        if self.num_after:
            more, state = self._run_ring_direction(
                -1, self.num_after, after, travelling_gradients, run_step, state, first=1
            )
            total = jax.tree.map(jnp.add, total, more)
        return total, state

    def _run_ring_direction(
        self,
        direction: int,
        last: int,
        travelling_keys: TravellingKeys,
        travelling_gradients: TravellingKeys,
        run_step: StepFunction,
        state: Any,
        *,
        first: int,
    ) -> tuple[TravellingKeys, Any]:
        """Runs ring steps `first` to `last` in one direction; the keys are the first step's."""
        me = lax.axis_index(self.axis_name)

        def process_arrival(
            hop: Any, travelling_keys: TravellingKeys, travelling_gradients: TravellingKeys, state: Any
        ) -> tuple[TravellingKeys, Any]:
            # Neither transfer depends on the kernel of this step, so both run while it computes.
            arriving = self.shift(travelling_gradients, direction)
            added, state = run_step((me - direction * jnp.int32(hop)) % self.size, travelling_keys, state)
            return jax.tree.map(jnp.add, arriving, added), state

        def step(
            hop: jax.Array, carry: tuple[TravellingKeys, TravellingKeys, Any]
        ) -> tuple[TravellingKeys, TravellingKeys, Any]:
            travelling_keys, travelling_gradients, state = carry
            upcoming = self.shift(travelling_keys, direction)
            return upcoming, *process_arrival(hop, travelling_keys, travelling_gradients, state)

        if last > first:
            travelling_keys, travelling_gradients, state = lax.fori_loop(
                first, last, step, (travelling_keys, travelling_gradients, state)
            )
        travelling_gradients, state = process_arrival(last, travelling_keys, travelling_gradients, state)
        return self.shift(travelling_gradients, -direction * last), state


def ring_of(record: RingAttention) -> Ring | None:
    """Returns the ring of a record; None where one device has everything."""
    size = axis_size(record.axis_name)
    if record.axis_name is None or size == 1:
        return None
    before, after = num_neighbours_with_keys(record, size)
    if before + after >= size - 1:  # one direction reaches every device
        before, after = size - 1, 0
    return Ring(record.axis_name, size, before, after, _is_striped(record))


def _masks_compare_indices(record: RingAttention) -> bool:
    """Returns whether causal and window compare indices, which are known when the call is traced."""
    return record.q_positions is None and record.kv_positions is None


def _is_striped(record: RingAttention) -> bool:
    """Returns whether the mask is causal, and nothing more, over queries and keys that are cut alike.

    Functions of pairs read indices that count on from the first of a part, which those of two halves do not.
    """
    length = record.query.shape[1]
    whole = length == record.key.shape[1] and length % 2 == 0 and length > 0 and not has_functions(record)
    return _masks_compare_indices(record) and causal_window_bounds(as_tiled_attention(record)) == (None, 0) and whole


def num_neighbours_with_keys(record: RingAttention, size: int) -> tuple[int, int]:
    """Returns how many devices before it, and after it, have keys that a device may have to see, not counted around the
    end.
    """
    everyone = size - 1, 0
    left, right = causal_window_bounds(as_tiled_attention(record))
    if not _masks_compare_indices(record) or (left is None and right is None):
        return everyone
    device, (queries, keys) = np.arange(size), (record.query.shape[1], record.key.shape[1])
    low = -1 if left is None else (device * queries - left)[:, None]
    high = size * keys if right is None else ((device + 1) * queries - 1 + right)[:, None]
    seen = ((device + 1) * keys - 1 >= low) & (device * keys <= high)
    distances = np.where(seen, device[:, None] - device, 0)
    return int(distances.max()), int(-distances.min())


def local_record(record: RingAttention, ring: Ring) -> RingAttention:
    """Returns the record of what this device works on."""
    rows = {name: axis for name, axis in QUERY_AXIS_BY_FIELD.items() if _varies_by_query(getattr(record, name), axis)}
    moved = {name: ring.stripe(getattr(record, name), axis) for name, axis in rows.items()}
    loads = {name: ring.stripe(x, 1) for name, x in travelling_keys_of(record).items()}
    return dataclasses.replace(record, **moved, **loads)


def _varies_by_query(x: Any, axis: int) -> bool:
    return x is not None and x.shape[axis] > 1


def travelling_keys_of(record: RingAttention) -> TravellingKeys:
    """Returns what travels."""
    return {name: x for name in TRAVELLING_FIELDS if (x := getattr(record, name)) is not None}


def step_record(
    record: RingAttention, ring: Ring, source: jax.Array, travelling_keys: TravellingKeys
) -> TiledAttention:
    """Returns the record of one ring step: this device's queries and the keys of device `source`. It has no sinks; the
    caller counts them once.
    """
    keys = travelling_keys["key"].shape[1]
    pairs = {
        name: columns(x, ring, source, keys) for name in ("bias", "mask") if (x := getattr(record, name)) is not None
    }
    position_fields: dict[str, jax.Array] = {}
    if causal_window_bounds(as_tiled_attention(record)) != (None, None):
        me, queries = lax.axis_index(record.axis_name), record.query.shape[1]
        position_fields["q_positions"] = ring.indices(me, queries) if record.q_positions is None else record.q_positions
        position_fields["kv_positions"] = travelling_keys.get("kv_positions", ring.indices(source, keys))
    if has_functions(record):
        first_query = lax.axis_index(record.axis_name) * record.query.shape[1]
        position_fields["dropout_origin"] = origin_of_pairs(record, first_query, source * keys)
    return dataclasses.replace(
        as_tiled_attention(record), **{**travelling_keys, **pairs, **position_fields}, softmax_aux=None
    )


def columns(x: jax.Array, ring: Ring, source: jax.Array, keys: int) -> jax.Array:
    """Returns the columns of a device's keys, of [B, H, T, K]; of [B, H, T, 1] all there is."""
    if x.shape[3] == 1:
        return x
    pieces = [lax.dynamic_slice_in_dim(x, start, n, axis=3) for start, n in ring.sequence_pieces(source, keys)]
    return pieces[0] if len(pieces) == 1 else jnp.concatenate(pieces, axis=3)


def put_key_columns(x: jax.Array, part: jax.Array, ring: Ring, source: jax.Array, keys: int) -> jax.Array:
    """Returns x with other values in the columns of a device's keys."""
    if x.shape[3] == 1:
        return part
    done = 0
    for start, n in ring.sequence_pieces(source, keys):
        x = lax.dynamic_update_slice_in_dim(x, part[..., done : done + n], start, axis=3)
        done += n
    return x
