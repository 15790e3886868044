"""The chunks of a row, which may be packed, and the segments that blocks scan at the same time
(csrc/delta_rule/segments.cuh).
"""

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.arithmetic import cdiv
from ejkernel.families.linear_recurrence import LinearRecurrence, has_decay_per_channel, num_state_heads

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


MAX_SEGMENT_CHUNKS_WITHOUT_SCAN = 256
"""The most chunks of a segment where no scan follows, if they divide: each of its parts then has 32."""


def num_scan_blocks(record: LinearRecurrence) -> int:
    """Returns the blocks of a scan that does not split rows."""
    return record.query.shape[0] * num_state_heads(record) * (record.value.shape[3] // VALUE_CHANNELS_PER_BLOCK)


def num_chunks(record: LinearRecurrence) -> int:
    """Returns the number of chunks of a row; the most that a packed one can have, whose sequences, and padding tokens
    before and after them, begin with chunks of their own.
    """
    tokens = record.query.shape[1]
    if record.cu_seqlens is None:
        return cdiv(tokens, CHUNK)
    sequences = record.cu_seqlens.shape[0] - 1
    return (tokens + CHUNK * sequences + 2 * (CHUNK - 1)) // CHUNK


def num_segments(record: LinearRecurrence) -> int:
    """Returns the number of segments of a row: as many as there are multiprocessors for."""
    segments = min(HOPPER_MULTIPROCESSORS // max(1, num_scan_blocks(record)), num_chunks(record) // MIN_SEGMENT_CHUNKS)
    return max(1, segments)


def chunk_table(record: LinearRecurrence) -> jax.Array:
    """Returns the chunks of a packed row, [num_chunks + 1, 4] in int32, as the kernels read them: first token, tokens,
    rows that are stored, and mark; the last entry begins with their number. Empty for a row that is not packed.
    """
    if record.cu_seqlens is None:
        return jnp.zeros(0, jnp.int32)
    tokens, entries, sequences = record.query.shape[1], num_chunks(record) + 1, record.cu_seqlens.shape[0] - 1
    # Padding tokens before the sequences are the first owner of chunks, those after them the last one.
    bounds = jnp.clip(record.cu_seqlens.astype(jnp.int32), 0, tokens)
    starts, ends = jnp.pad(bounds, (1, 0)), jnp.pad(bounds, (0, 1), constant_values=tokens)
    owner = jnp.arange(sequences + 2, dtype=jnp.int32)
    is_padding = (owner == 0) | (owner == sequences + 1)
    chunks = jnp.maximum(cdiv(ends - starts, CHUNK), jnp.where(is_padding, 0, 1))
    # Sums over a few owners, which XLA fuses, instead of scans and gathers.
    last = jnp.sum(jnp.where(owner[:, None] >= owner[None], chunks[None], 0), axis=1)
    first, index = last - chunks, jnp.arange(entries, dtype=jnp.int32)[:, None]
    is_owner = (index >= first) & (index < last)

    def of_owner(field: jax.Array) -> jax.Array:
        return jnp.sum(jnp.where(is_owner, field, 0), axis=1)

    token = starts + (index - first) * CHUNK
    rows = jnp.clip(ends - token, 0, CHUNK)
    mark = jnp.where(is_padding, sequences, owner - 1) * 4 + (index == first) + 2 * (index == last - 1)
    count = jnp.sum(chunks)
    token = jnp.where(index[:, 0] == entries - 1, count, of_owner(jnp.minimum(token, max(0, tokens - 1))))
    mark = jnp.where(index[:, 0] < count, of_owner(mark), -1)
    return jnp.stack([token, of_owner(jnp.where(is_padding, 0, rows)), of_owner(rows), mark], axis=1).astype(jnp.int32)


def starting_states(record: LinearRecurrence) -> jax.Array | None:
    """Returns the states before the first tokens of rows or packed sequences; None for zeros."""
    return record.initial_state if record.cu_seqlens is None else record.sequence_state


def scan_handler(name: str, record: LinearRecurrence, segments: int) -> str:
    """Returns the name of a scan's handler: another one, whose calls XLA does not capture into CUDA graphs, if earlier
    kernels of the call pass data to the scan in results that nothing else reads.

    Args:
        name: The name without segments.
        record: The canonical arguments.
        segments: The number of segments of each row.
    """
    passes_results = segments > 1 and has_decay_per_channel(record) == (record.beta is not None)
    return f"{name}_in_segments" if passes_results else name


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


def num_segments_without_scan(tokens: int) -> int:
    """Returns the number of segments of a row that no scan follows. All have as many chunks."""
    chunks = cdiv(tokens, CHUNK)
    most = cdiv(chunks, MAX_SEGMENT_CHUNKS_WITHOUT_SCAN)
    return max(segments for segments in range(1, most + 1) if chunks % segments == 0)


def chunks_before_an_empty_segment(tokens: int, segments: int, *, reverse: bool) -> np.ndarray:
    """Returns the chunks of a row, [chunks + 1, 4] in int32, as `plan.chunk_table` does: those of so many segments, and
    chunks without tokens for one that follows them in the order of the scan.
    """
    chunks = cdiv(tokens, CHUNK)
    entries = cdiv(chunks, segments) * (segments + 1)
    table = np.zeros((entries + 1, 4), np.int32)
    first = entries - chunks if reverse else 0
    starts = np.arange(chunks, dtype=np.int32) * CHUNK
    table[first : first + chunks, 0] = starts
    table[first : first + chunks, 1] = table[first : first + chunks, 2] = np.minimum(tokens - starts, CHUNK)
    table[entries, 0] = entries
    return table
