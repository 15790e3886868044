"""The chunks of a row or a packed one, and the segments of them that blocks scan at the same time
(csrc/delta_rule/segments.cuh).
"""

import jax
import jax.numpy as jnp
from jax import lax

from ejkernel.arithmetic import cdiv
from ejkernel.families.linear_recurrence import LinearRecurrence, num_state_heads

CHUNK = 64
"""Tokens per chunk, of all kernels."""

VALUE_CHANNELS_PER_BLOCK = 64
"""Value channels of a head that a block of a scan computes."""

HOPPER_MULTIPROCESSORS = 132
"""Multiprocessors of a Hopper chip, each of which runs one block of a scan at a time."""

MIN_SEGMENT_CHUNKS = 8
"""The fewest chunks of a segment."""

SEGMENT_PARTS = 8
"""The parts of a segment whose states from zeros are computed at the same time without the delta rule."""


def num_scan_blocks(record: LinearRecurrence) -> int:
    """Returns the blocks of a scan that does not split rows."""
    return record.query.shape[0] * num_state_heads(record) * (record.value.shape[3] // VALUE_CHANNELS_PER_BLOCK)


def num_chunks(record: LinearRecurrence) -> int:
    """Returns the number of chunks of a row; the most that a packed one can have, whose sequences and whose padding
    tokens before and after them begin with chunks of their own.
    """
    tokens = record.query.shape[1]
    if record.cu_seqlens is None:
        return cdiv(tokens, CHUNK)
    return (tokens + (CHUNK - 1) * (record.cu_seqlens.shape[0] + 1)) // CHUNK


def num_segments(record: LinearRecurrence) -> int:
    """Returns the number of segments of a row: as many as there are multiprocessors for."""
    segments = min(HOPPER_MULTIPROCESSORS // max(1, num_scan_blocks(record)), num_chunks(record) // MIN_SEGMENT_CHUNKS)
    return max(1, segments)


def chunk_table(record: LinearRecurrence) -> jax.Array:
    """Returns the chunks of a packed row, [num_chunks + 1, 4] in int32, as the kernels read them: first token, tokens,
    rows that are stored, and mark; then the number of chunks. Empty for a row that is not packed.
    """
    if record.cu_seqlens is None:
        return jnp.zeros(0, jnp.int32)
    tokens, chunks = record.query.shape[1], num_chunks(record)
    sequences = record.cu_seqlens.shape[0] - 1
    bounds = lax.cummax(jnp.clip(record.cu_seqlens.astype(jnp.int32), 0, tokens))
    starts = jnp.concatenate([jnp.zeros(1, jnp.int32), bounds])
    ends = jnp.concatenate([bounds, jnp.full(1, tokens, jnp.int32)])
    last_chunks = jnp.cumsum(cdiv(ends - starts, CHUNK))  # each sequence's, exclusive
    index = jnp.arange(chunks, dtype=jnp.int32)
    owner = jnp.sum(index[:, None] >= last_chunks[None], axis=1)
    owner = jnp.minimum(owner, sequences + 1)
    first = (last_chunks - cdiv(ends - starts, CHUNK))[owner]
    is_chunk = index < last_chunks[-1]
    token = jnp.where(is_chunk, starts[owner] + (index - first) * CHUNK, tokens)
    rows = jnp.clip(ends[owner] - token, 0, CHUNK)
    is_padding = (owner == 0) | (owner == sequences + 1)
    mark = jnp.where(is_padding, sequences, owner - 1) * 4 + (index == first) + 2 * (index == last_chunks[owner] - 1)
    table = jnp.stack([token, jnp.where(is_padding, 0, rows), rows, mark], axis=1)
    count = jnp.zeros((1, 4), jnp.int32).at[0, 0].set(last_chunks[-1])
    return jnp.concatenate([table, count]).astype(jnp.int32)


def starting_states(record: LinearRecurrence) -> jax.Array | None:
    """Returns the states before the first tokens of rows or packed sequences; None for zeros."""
    return record.initial_state if record.cu_seqlens is None else record.sequence_state


def states_after(record: LinearRecurrence, stored: jax.Array, before: jax.Array) -> jax.Array:
    """Returns the states after rows or sequences, from those that a scan has stored.

    Args:
        record: The canonical arguments.
        stored: [B, H, K, V], or [N, H, K, V] of packed sequences, where those without tokens are not written.
        before: The states before them, in the scan's order.
    """
    if record.cu_seqlens is None:
        return stored
    lengths = jnp.diff(lax.cummax(jnp.clip(record.cu_seqlens, 0, record.query.shape[1])))
    return jnp.where((lengths > 0)[:, None, None, None], stored, before)


def segment_results(record: LinearRecurrence, segments: int) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Returns the results of a scan that hold what starts its segments: states and decays of their parts, and the
    states before segments; empty with the delta rule, whose blocks start earlier instead.

    Args:
        record: The canonical arguments.
        segments: The number of segments of each row.
    """
    rows, heads = record.query.shape[0], num_state_heads(record)
    starts, state = segments - 1, (record.query.shape[3], record.value.shape[3])
    if record.beta is not None or starts == 0:
        return (jax.ShapeDtypeStruct((0,), jnp.float32),) * 3
    shapes = (
        (rows, heads, starts, SEGMENT_PARTS, *state),
        (rows, heads, starts, SEGMENT_PARTS + 1),
        (rows, starts, heads, *state),
    )
    return tuple(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes)
