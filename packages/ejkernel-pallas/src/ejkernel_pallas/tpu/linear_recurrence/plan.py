"""A record in the kernels' layout: whole chunks, and one array for the fields with a single element per token and
head.

    [B, T, heads, channels] ──► [B, T', heads * channels]       blocks [C, heads per step * channels], if lanes allow
                                [B, heads, T', channels]        blocks [heads per step, C, channels] otherwise
    decay, beta, dt, skip   ──► [B, H / heads, T', heads * 4]   blocks [C, heads * 4]

T' is a multiple of the chunk. Padding tokens have zeros everywhere: they decay nothing, write nothing and read nothing.
Packed sequences start a new chunk each: their tokens are gathered so that no chunk has tokens of two of them.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ejkernel.arithmetic import cdiv
from ejkernel.families.linear_recurrence import LinearRecurrence, in_slots, segment_roles
from ejkernel_pallas.tpu.linear_recurrence.spec import SCALAR_FIELDS, RecurrenceSpec
from ejkernel_pallas.tpu.mosaic.division import divide
from ejkernel_pallas.tpu.mosaic.launch import Operand
from ejkernel_pallas.tpu.mosaic.packed_chunks import ChunkPositions, chunk_table, make_chunk_positions, slot_table

MIN_LOG_DECAY = -104.0
"""exp of it is 0 in float32: log gates that channels share are clamped to it, including -inf."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """A record's chunks.

    Attributes:
        spec: Constants of the kernels.
        chunks: Chunks per row.
        tokens: T.
        chunks: Of a row.
        token_positions: Positions of packed sequences' tokens; None without.
        table: int32 [B * chunks] for the kernels. Packed sequences: `4 * owner + 2 * is_first + is_last`, with states
            in slots `8 * slot + 4 * keeps + 2 * is_first + is_last`. Otherwise the number of runs of segments in each
            chunk.
        runs: float32 [B, T'] the run of each token in its chunk, -1 for padding; None without segments.
        in_slots: Whether the states of packed sequences are slots, which the forward kernel updates in place.
    """

    spec: RecurrenceSpec
    rows: int
    tokens: int
    chunks: int
    token_positions: ChunkPositions | None
    table: jax.Array
    runs: jax.Array | None
    in_slots: bool = False

    @property
    def length(self) -> int:
        """Returns T'."""
        return self.chunks * self.spec.chunk

    def align(self, x: jax.Array) -> jax.Array:
        """Returns [B, T, ...] as [B, T', ...], with zeros for padding."""
        if self.token_positions is not None:
            return jnp.take(x, self.token_positions.token_at_position, axis=1, mode="fill", fill_value=0)
        return jnp.pad(x, ((0, 0), (0, self.length - self.tokens), *((0, 0),) * (x.ndim - 2)))

    def unalign(self, x: jax.Array) -> jax.Array:
        """Returns [B, T', ...] as [B, T, ...]."""
        if self.token_positions is not None:
            return jnp.take(x, self.token_positions.position_of_token, axis=1, mode="fill", fill_value=0)
        return x[:, : self.tokens]


def make_plan(record: LinearRecurrence, spec: RecurrenceSpec) -> Plan:
    """Returns the chunks of a record."""
    rows, tokens = record.query.shape[:2]
    if record.cu_seqlens is not None:
        token_positions = make_chunk_positions(record.cu_seqlens.astype(jnp.int32), tokens, spec.chunk)
        slots_record = in_slots(record)
        if slots_record is None:
            table = chunk_table(token_positions)
        else:
            table = slot_table(token_positions, slots_record.indices, slots_record.slots.shape[0])
        # JAX's rule for `vmap` drops a traced grid that is not batched where tables are: it depends on them.
        token_positions = token_positions._replace(num_used_chunks=token_positions.num_used_chunks + 0 * table[0])
        return Plan(
            spec,
            rows,
            tokens,
            len(token_positions.sequence_of_chunk),
            token_positions,
            table,
            None,
            slots_record is not None,
        )
    chunks = cdiv(tokens, spec.chunk)
    plan = Plan(spec, rows, tokens, chunks, None, jnp.ones(rows * chunks, jnp.int32), None)
    if record.segment_ids is None:
        return plan
    real, starts = segment_roles(jnp.asarray(record.segment_ids))
    real, starts = plan.align(real), plan.align(starts)
    run = jnp.cumsum((starts & real).reshape(rows, chunks, spec.chunk), axis=2, dtype=jnp.int32)
    count = jnp.where(real.reshape(run.shape), run, 0).max(axis=2) + 1
    runs = jnp.where(real, run.reshape(rows, -1), -1).astype(jnp.float32)
    return dataclasses.replace(plan, table=count.reshape(-1), runs=runs)


# --- arrays ----------------------------------------------------------------------------------------------------------


def wide_operand(plan: Plan, name: str, x: jax.Array | jax.ShapeDtypeStruct, count: int, backwards: bool) -> Operand:
    """Returns a field [B, T', heads, channels], or a result of such a shape, as blocks of a step's heads."""
    spec, width = plan.spec, plan.spec.width(name)
    block = spec.block_heads(count)

    def head(step: Any) -> Any:
        return divide(step * (spec.heads * count), spec.total_heads * block)

    chunk = _chunk_index(plan, backwards)
    if spec.lies_in_lanes(name, count):
        shaped = _shaped(x, (plan.rows, plan.length, count * width), lambda x: x.reshape(*x.shape[:2], -1))
        return Operand(shaped, (None, spec.chunk, block * width), lambda b, h, c, *_: (b, chunk(c), head(h)))
    shaped = _shaped(x, (plan.rows, count, plan.length, width), lambda x: x.swapaxes(1, 2))
    return Operand(shaped, (None, block, spec.chunk, width), lambda b, h, c, *_: (b, head(h), chunk(c), 0))


def from_operand(plan: Plan, name: str, x: jax.Array, count: int) -> jax.Array:
    """Returns a result of `wide_operand`'s shape as [B, T', heads, channels]."""
    if plan.spec.lies_in_lanes(name, count):
        return x.reshape(plan.rows, plan.length, count, plan.spec.width(name))
    return x.swapaxes(1, 2)


def columns_operand(plan: Plan, x: jax.Array | jax.ShapeDtypeStruct, backwards: bool) -> Operand:
    """Returns the array of `columns` as blocks of a step's heads."""
    chunk, width = _chunk_index(plan, backwards), column_count(plan.spec)
    return Operand(x, (None, None, plan.spec.chunk, width), lambda b, h, c, *_: (b, h, chunk(c), 0))


def column_count(spec: RecurrenceSpec) -> int:
    """Returns the elements per token in a block of columns."""
    return len(spec.columns) * spec.heads + spec.runs


def columns(plan: Plan, record: LinearRecurrence) -> tuple[jax.Array, jax.Array | None]:
    """Returns the fields with one element per token and head, float32, those of a step's heads next to each other.

    Returns:
        [B, H / heads, T', columns], and [B, H / heads, chunks, rows, C] of the elements that kernels read along lanes.
    """
    spec = plan.spec
    shape = (plan.rows, plan.tokens, spec.total_heads)
    numbers = {
        name: plan.align(_as_scalar(getattr(record, name), shape)) for name in SCALAR_FIELDS if name in spec.columns
    }
    if spec.sums:
        numbers |= zip(spec.sums, _sums(plan, plan.align(_as_scalar(record.decay, shape))), strict=True)
    parts = [numbers[name].reshape(plan.rows, plan.length, spec.steps, spec.heads) for name in spec.columns]
    if plan.runs is not None:
        runs = plan.runs[:, :, None, None]
        parts.append(jnp.broadcast_to(runs, (plan.rows, plan.length, spec.steps, 1)))
    along = None
    if spec.sums:
        along = jnp.concatenate([*parts[: len(spec.sums)], *parts[len(spec.columns) :]], axis=3)
        along = along.reshape(plan.rows, plan.chunks, spec.chunk, spec.steps, spec.rows).transpose(0, 3, 1, 4, 2)
    return jnp.concatenate(parts, axis=3).swapaxes(1, 2), along


def _as_scalar(x: Any, shape: tuple[int, ...]) -> jax.Array:
    x = x[..., 0] if x.ndim == len(shape) + 1 else x
    return jnp.broadcast_to(x.astype(jnp.float32), shape)


def _sums(plan: Plan, gates: jax.Array) -> tuple[jax.Array, ...]:
    """Returns cumulative sums of log gates [B, T', H] in every chunk, or run of a segment, as one or two numbers.

    Of two the first are multiples of 2 ** -8, small enough for float32 to add exactly; the second are sums of the
    remainders, at most 2 ** -9 per token.
    """
    shape = (plan.rows, plan.chunks, plan.spec.chunk, -1)
    if plan.runs is not None:
        gates = jnp.where(plan.runs[:, :, None] < 0, 0.0, gates)
    gates = jnp.maximum(gates, MIN_LOG_DECAY)
    coarse = jnp.round(gates * 256.0) / 256.0
    parts = jnp.stack([coarse, gates - coarse] if len(plan.spec.sums) > 1 else [gates])
    parts = parts.reshape(len(parts), *shape)
    if plan.runs is None:
        found = jnp.cumsum(parts, axis=3)
    else:
        # Selected, not subtracted: a gate of another segment may be NaN.
        runs = lax.cummax(plan.runs.reshape(*shape[:3], 1), axis=2)
        starts_run = jnp.concatenate([jnp.ones_like(runs[:, :, :1], bool), runs[:, :, 1:] != runs[:, :, :-1]], axis=2)
        found, _ = lax.associative_scan(_add_with_restart, (parts, jnp.broadcast_to(starts_run, parts.shape)), axis=3)
    return tuple(found.reshape(len(parts), plan.rows, plan.length, -1))


def _add_with_restart(
    first: tuple[jax.Array, jax.Array], second: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, jax.Array]:
    """Returns sums that restart where the second element of a pair says so."""
    return jnp.where(second[1], second[0], first[0] + second[0]), first[1] | second[1]


def rows_operand(plan: Plan, x: jax.Array | jax.ShapeDtypeStruct, backwards: bool) -> Operand:
    """Returns [B, H / heads, chunks, rows, C], as blocks of a step's heads."""
    chunk, spec = _chunk_index(plan, backwards), plan.spec
    return Operand(x, (None, None, None, x.shape[3], spec.chunk), lambda b, h, c, *_: (b, h, chunk(c), 0, 0))


def column_gradients(
    plan: Plan, record: LinearRecurrence, x: jax.Array, along: jax.Array | None
) -> dict[str, jax.Array]:
    """Returns the gradients [B, T', H] of the fields with one element per token and head."""
    spec = plan.spec
    parts = x[..., : len(spec.columns) * spec.heads]
    parts = parts.reshape(plan.rows, spec.steps, plan.length, len(spec.columns), spec.heads)
    parts = parts.transpose(3, 0, 2, 1, 4).reshape(len(spec.columns), plan.rows, plan.length, spec.total_heads)
    found = dict(zip(spec.columns, parts, strict=True))
    if along is not None:
        along = along.transpose(0, 2, 4, 1, 3).reshape(plan.rows, plan.length, spec.total_heads)
        shape = (plan.rows, plan.tokens, spec.total_heads)
        gates = plan.align(_as_scalar(record.decay, shape))
        _, pull = jax.vjp(lambda gates: sum(_sums(plan, gates)), gates)
        (found["decay"],) = pull(found["coarse"] + along)
    return found


def states_operand(plan: Plan, x: jax.Array | jax.ShapeDtypeStruct, backwards: bool) -> Operand:
    """Returns states [B or N, H, K, V] of rows or sequences, as blocks of a step's heads."""
    spec, chunk = plan.spec, _chunk_index(plan, backwards)
    block = (None, spec.heads, spec.keys, spec.values)
    if plan.token_positions is None:
        return Operand(x, block, lambda b, h, c, *_: (b, h, 0, 0))
    per_state = 8 if plan.in_slots else 4
    return Operand(x, block, lambda b, h, c, table: (divide(table[chunk(c)], per_state), h, 0, 0))


def chunk_states_operand(plan: Plan, x: jax.Array | jax.ShapeDtypeStruct, backwards: bool) -> Operand:
    """Returns states [B, chunks, H, K, V] before every chunk, as blocks."""
    spec, chunk = plan.spec, _chunk_index(plan, backwards)
    return Operand(x, (None, None, spec.heads, spec.keys, spec.values), lambda b, h, c, *_: (b, chunk(c), h, 0, 0))


def _chunk_index(plan: Plan, backwards: bool) -> Any:
    return (lambda c: plan.chunks - 1 - c) if backwards else (lambda c: c)


def _shaped(x: jax.Array | jax.ShapeDtypeStruct, shape: tuple[int, ...], arrange: Any) -> Any:
    return jax.ShapeDtypeStruct(shape, x.dtype) if isinstance(x, jax.ShapeDtypeStruct) else arrange(x)
