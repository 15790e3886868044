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
from ejkernel.families.linear_recurrence import LinearRecurrence, real_and_segment_start_tokens, slotted_states
from ejkernel_pallas.tpu.linear_recurrence.spec import SCALAR_FIELDS, RecurrenceSpec
from ejkernel_pallas.tpu.mosaic.division import divide
from ejkernel_pallas.tpu.mosaic.launch import Operand
from ejkernel_pallas.tpu.mosaic.packed_chunks import ChunkPositions, chunk_table, make_chunk_positions, slot_table

MIN_LOG_DECAY = -104.0
"""The smallest log gate, whose exp is 0 in float32: log gates that channels share are clamped to it, -inf included."""


@dataclasses.dataclass(frozen=True)
class ChunkPlan:
    """The chunks of a record, and where they have its tokens.

    Attributes:
        spec: Constants of the kernels.
        batch_size: B, the number of rows.
        tokens_per_row: T.
        chunks_per_row: The number of chunks per row.
        token_positions: The positions of packed sequences' tokens; None without packing.
        chunk_table: int32 [B * chunks] for the kernels. Packed sequences: `4 * sequence + 2 * is_first + is_last`; with
            states in slots `8 * slot + 4 * has_slot + 2 * is_first + is_last`. Otherwise the number of runs of segments
            in each chunk.
        run_index_of_token: float32 [B, T'], the index in its chunk of each token's run of a segment, -1 for padding;
            None without segments.
        states_in_slots: Whether the states of packed sequences are slots, which the forward kernel updates in place.
    """

    spec: RecurrenceSpec
    batch_size: int
    tokens_per_row: int
    chunks_per_row: int
    token_positions: ChunkPositions | None
    chunk_table: jax.Array
    run_index_of_token: jax.Array | None
    states_in_slots: bool = False

    @property
    def padded_tokens_per_row(self) -> int:
        """Returns T', the number of positions per row: tokens and padding."""
        return self.chunks_per_row * self.spec.chunk_tokens

    def gather_to_chunks(self, x: jax.Array) -> jax.Array:
        """Returns [B, T, ...] as [B, T', ...], with zeros for padding."""
        if self.token_positions is not None:
            return jnp.take(x, self.token_positions.token_at_position, axis=1, mode="fill", fill_value=0)
        return jnp.pad(x, ((0, 0), (0, self.padded_tokens_per_row - self.tokens_per_row), *((0, 0),) * (x.ndim - 2)))

    def gather_from_chunks(self, x: jax.Array) -> jax.Array:
        """Returns [B, T', ...] as [B, T, ...]."""
        if self.token_positions is not None:
            return jnp.take(x, self.token_positions.position_of_token, axis=1, mode="fill", fill_value=0)
        return x[:, : self.tokens_per_row]


def make_plan(record: LinearRecurrence, spec: RecurrenceSpec) -> ChunkPlan:
    """Returns the chunks of a record."""
    rows, tokens = record.query.shape[:2]
    if record.cu_seqlens is not None:
        token_positions = make_chunk_positions(record.cu_seqlens.astype(jnp.int32), tokens, spec.chunk_tokens)
        slots_record = slotted_states(record)
        if slots_record is None:
            table = chunk_table(token_positions)
        else:
            table = slot_table(token_positions, slots_record.indices, slots_record.slots.shape[0])
        # JAX's rule for `vmap` drops a traced grid that is not batched where tables are: it depends on them.
        token_positions = token_positions._replace(num_used_chunks=token_positions.num_used_chunks + 0 * table[0])
        return ChunkPlan(
            spec,
            rows,
            tokens,
            len(token_positions.sequence_of_chunk),
            token_positions,
            table,
            None,
            slots_record is not None,
        )
    chunks = cdiv(tokens, spec.chunk_tokens)
    plan = ChunkPlan(spec, rows, tokens, chunks, None, jnp.ones(rows * chunks, jnp.int32), None)
    if record.segment_ids is None:
        return plan
    real, starts = real_and_segment_start_tokens(jnp.asarray(record.segment_ids))
    real, starts = plan.gather_to_chunks(real), plan.gather_to_chunks(starts)
    run = jnp.cumsum((starts & real).reshape(rows, chunks, spec.chunk_tokens), axis=2, dtype=jnp.int32)
    count = jnp.where(real.reshape(run.shape), run, 0).max(axis=2) + 1
    runs = jnp.where(real, run.reshape(rows, -1), -1).astype(jnp.float32)
    return dataclasses.replace(plan, chunk_table=count.reshape(-1), run_index_of_token=runs)


# --- arrays ----------------------------------------------------------------------------------------------------------


def channel_field_operand(
    plan: ChunkPlan, name: str, x: jax.Array | jax.ShapeDtypeStruct, count: int, reverses_chunks: bool
) -> Operand:
    """Returns a field [B, T', heads, channels], or a result of such a shape, as blocks of a step's heads."""
    spec, width = plan.spec, plan.spec.num_channels(name)
    block, head = spec.heads_per_block(count), _head_block_index_map(spec, count)
    chunk = _chunk_index_map(plan, reverses_chunks)
    if spec.has_heads_along_lanes(name, count):
        shaped = _rearrange_array_or_shape(
            x, (plan.batch_size, plan.padded_tokens_per_row, count * width), lambda x: x.reshape(*x.shape[:2], -1)
        )
        return Operand(shaped, (None, spec.chunk_tokens, block * width), lambda b, h, c, *_: (b, chunk(c), head(h)))
    shaped = _rearrange_array_or_shape(
        x, (plan.batch_size, count, plan.padded_tokens_per_row, width), lambda x: x.swapaxes(1, 2)
    )
    return Operand(shaped, (None, block, spec.chunk_tokens, width), lambda b, h, c, *_: (b, head(h), chunk(c), 0))


def step_field_operand(plan: ChunkPlan, name: str, x: jax.Array | jax.ShapeDtypeStruct, count: int) -> Operand:
    """Returns a field [1, T', heads, channels], or a result of such a shape, as blocks of a chunk's tokens and a step's
    heads, whose heads are rows.
    """
    spec, width = plan.spec, plan.spec.num_channels(name)
    block, head = spec.heads_per_block(count), _head_block_index_map(spec, count)
    shape = (plan.padded_tokens_per_row, count // block, block, width)
    shaped = _rearrange_array_or_shape(x, shape, lambda x: x.reshape(shape))
    return Operand(shaped, (spec.chunk_tokens, None, block, width), lambda b, h, c, *_: (c, head(h), 0, 0))


def step_scalars_operand(plan: ChunkPlan, record: LinearRecurrence) -> Operand:
    """Returns the fields with one element per token and head, float32 [T', H / heads, heads, fields], as blocks."""
    spec, shape = plan.spec, (plan.batch_size, plan.tokens_per_row, plan.spec.total_heads)
    fields = [
        plan.gather_to_chunks(_broadcast_scalar_field(getattr(record, name), shape)) for name in spec.step_scalar_names
    ]
    x = jnp.stack(fields, axis=-1).reshape(-1, spec.num_head_steps, spec.heads_per_step, len(fields))
    return Operand(x, (spec.chunk_tokens, None, *x.shape[2:]), lambda b, h, c, *_: (c, h, 0, 0))


def _head_block_index_map(spec: RecurrenceSpec, count: int) -> Any:
    """Returns the map from a step over heads to its block of a field of `count` heads."""
    block = spec.heads_per_block(count)
    return lambda step: divide(step * (spec.heads_per_step * count), spec.total_heads * block)


def unpack_channel_result(plan: ChunkPlan, name: str, x: jax.Array, count: int) -> jax.Array:
    """Returns a result of `channel_field_operand`'s shape as [B, T', heads, channels]."""
    if plan.spec.has_heads_along_lanes(name, count):
        return x.reshape(plan.batch_size, plan.padded_tokens_per_row, count, plan.spec.num_channels(name))
    return x.swapaxes(1, 2)


def scalar_columns_operand(plan: ChunkPlan, x: jax.Array | jax.ShapeDtypeStruct, reverses_chunks: bool) -> Operand:
    """Returns the array of `scalar_columns` as blocks of a step's heads."""
    chunk, width = _chunk_index_map(plan, reverses_chunks), num_scalar_columns(plan.spec)
    return Operand(x, (None, None, plan.spec.chunk_tokens, width), lambda b, h, c, *_: (b, h, chunk(c), 0))


def num_scalar_columns(spec: RecurrenceSpec) -> int:
    """Returns the elements per token in a block of columns."""
    return len(spec.scalar_names) * spec.heads_per_step + spec.has_segment_runs


def make_scalar_arrays(plan: ChunkPlan, record: LinearRecurrence) -> tuple[jax.Array, jax.Array | None]:
    """Returns the fields with one element per token and head, float32, those of a step's heads next to each other.

    Returns:
        [B, H / heads, T', columns], and [B, H / heads, chunks, rows, C] of the elements that kernels read along lanes.
    """
    spec = plan.spec
    shape = (plan.batch_size, plan.tokens_per_row, spec.total_heads)
    arrays = {
        name: plan.gather_to_chunks(_broadcast_scalar_field(getattr(record, name), shape))
        for name in SCALAR_FIELDS
        if name in spec.scalar_names
    }
    if spec.gate_sum_names:
        arrays |= zip(
            spec.gate_sum_names,
            _cumulative_gate_sums(plan, plan.gather_to_chunks(_broadcast_scalar_field(record.decay, shape))),
            strict=True,
        )
    parts = [
        arrays[name].reshape(plan.batch_size, plan.padded_tokens_per_row, spec.num_head_steps, spec.heads_per_step)
        for name in spec.scalar_names
    ]
    if plan.run_index_of_token is not None:
        runs = plan.run_index_of_token[:, :, None, None]
        parts.append(jnp.broadcast_to(runs, (plan.batch_size, plan.padded_tokens_per_row, spec.num_head_steps, 1)))
    scalar_rows = None
    if spec.gate_sum_names:
        scalar_rows = jnp.concatenate([*parts[: len(spec.gate_sum_names)], *parts[len(spec.scalar_names) :]], axis=3)
        scalar_rows = scalar_rows.reshape(
            plan.batch_size, plan.chunks_per_row, spec.chunk_tokens, spec.num_head_steps, spec.num_scalar_rows
        ).transpose(0, 3, 1, 4, 2)
    return jnp.concatenate(parts, axis=3).swapaxes(1, 2), scalar_rows


def _broadcast_scalar_field(x: Any, shape: tuple[int, ...]) -> jax.Array:
    x = x[..., 0] if x.ndim == len(shape) + 1 else x
    return jnp.broadcast_to(x.astype(jnp.float32), shape)


def _cumulative_gate_sums(plan: ChunkPlan, gates: jax.Array) -> tuple[jax.Array, ...]:
    """Returns cumulative sums of log gates [B, T', H] in every chunk, or run of a segment, as one array or two.

    Of two arrays the first has multiples of 2 ** -8, small enough for float32 to add exactly; the second has sums of
    the remainders, at most 2 ** -9 per token.
    """
    shape = (plan.batch_size, plan.chunks_per_row, plan.spec.chunk_tokens, -1)
    if plan.run_index_of_token is not None:
        gates = jnp.where(plan.run_index_of_token[:, :, None] < 0, 0.0, gates)
    gates = jnp.maximum(gates, MIN_LOG_DECAY)
    coarse = jnp.round(gates * 256.0) / 256.0
    parts = jnp.stack([coarse, gates - coarse] if len(plan.spec.gate_sum_names) > 1 else [gates])
    parts = parts.reshape(len(parts), *shape)
    if plan.run_index_of_token is None:
        found = jnp.cumsum(parts, axis=3)
    else:
        # Selected, not subtracted: a gate of another segment may be NaN.
        runs = lax.cummax(plan.run_index_of_token.reshape(*shape[:3], 1), axis=2)
        starts_run = jnp.concatenate([jnp.ones_like(runs[:, :, :1], bool), runs[:, :, 1:] != runs[:, :, :-1]], axis=2)
        found, _ = lax.associative_scan(_add_with_restart, (parts, jnp.broadcast_to(starts_run, parts.shape)), axis=3)
    return tuple(found.reshape(len(parts), plan.batch_size, plan.padded_tokens_per_row, -1))


def _add_with_restart(
    left: tuple[jax.Array, jax.Array], right: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, jax.Array]:
    """Returns sums that restart where the second element of a pair says so."""
    return jnp.where(right[1], right[0], left[0] + right[0]), left[1] | right[1]


def scalar_rows_operand(plan: ChunkPlan, x: jax.Array | jax.ShapeDtypeStruct, reverses_chunks: bool) -> Operand:
    """Returns [B, H / heads, chunks, rows, C], as blocks of a step's heads."""
    chunk, spec = _chunk_index_map(plan, reverses_chunks), plan.spec
    return Operand(x, (None, None, None, x.shape[3], spec.chunk_tokens), lambda b, h, c, *_: (b, h, chunk(c), 0, 0))


def scalar_gradients(
    plan: ChunkPlan, record: LinearRecurrence, x: jax.Array, scalar_rows: jax.Array | None
) -> dict[str, jax.Array]:
    """Returns the gradients [B, T', H] of the fields with one element per token and head."""
    spec = plan.spec
    parts = x[..., : len(spec.scalar_names) * spec.heads_per_step]
    parts = parts.reshape(
        plan.batch_size, spec.num_head_steps, plan.padded_tokens_per_row, len(spec.scalar_names), spec.heads_per_step
    )
    parts = parts.transpose(3, 0, 2, 1, 4).reshape(
        len(spec.scalar_names), plan.batch_size, plan.padded_tokens_per_row, spec.total_heads
    )
    found = dict(zip(spec.scalar_names, parts, strict=True))
    if scalar_rows is not None:
        scalar_rows = scalar_rows.transpose(0, 2, 4, 1, 3).reshape(
            plan.batch_size, plan.padded_tokens_per_row, spec.total_heads
        )
        shape = (plan.batch_size, plan.tokens_per_row, spec.total_heads)
        gates = plan.gather_to_chunks(_broadcast_scalar_field(record.decay, shape))
        _, pull = jax.vjp(lambda gates: sum(_cumulative_gate_sums(plan, gates)), gates)
        (found["decay"],) = pull(found["coarse_sums"] + scalar_rows)
    return found


def sequence_states_operand(plan: ChunkPlan, x: jax.Array | jax.ShapeDtypeStruct, reverses_chunks: bool) -> Operand:
    """Returns states [B or N, H, K, V] of rows or sequences, as blocks of a step's heads."""
    spec, chunk = plan.spec, _chunk_index_map(plan, reverses_chunks)
    block = (None, spec.heads_per_step, spec.key_dim, spec.value_dim)
    if plan.token_positions is None:
        return Operand(x, block, lambda b, h, c, *_: (b, h, 0, 0))
    per_state = 8 if plan.states_in_slots else 4
    return Operand(x, block, lambda b, h, c, table: (divide(table[chunk(c)], per_state), h, 0, 0))


def chunk_states_operand(plan: ChunkPlan, x: jax.Array | jax.ShapeDtypeStruct, reverses_chunks: bool) -> Operand:
    """Returns states [B, chunks, H, K, V] before every chunk, as blocks."""
    spec, chunk = plan.spec, _chunk_index_map(plan, reverses_chunks)
    return Operand(
        x, (None, None, spec.heads_per_step, spec.key_dim, spec.value_dim), lambda b, h, c, *_: (b, chunk(c), h, 0, 0)
    )


def _chunk_index_map(plan: ChunkPlan, reverses_chunks: bool) -> Any:
    return (lambda c: plan.chunks_per_row - 1 - c) if reverses_chunks else (lambda c: c)


def _rearrange_array_or_shape(x: jax.Array | jax.ShapeDtypeStruct, shape: tuple[int, ...], rearrange: Any) -> Any:
    return jax.ShapeDtypeStruct(shape, x.dtype) if isinstance(x, jax.ShapeDtypeStruct) else rearrange(x)
