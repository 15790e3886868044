"""The segments of a long row that blocks scan at the same time (csrc/delta_rule/segments.cuh)."""

import jax
import jax.numpy as jnp

from ejkernel.arithmetic import cdiv
from ejkernel.families.linear_recurrence import LinearRecurrence, num_state_heads

CHUNK = 64
"""Tokens per chunk, of all kernels."""

VALUE_CHANNELS_PER_BLOCK = 64
"""Value channels of a head that a block of a scan computes."""

HOPPER_MULTIPROCESSORS = 132
"""Multiprocessors of a Hopper chip, each of which runs one block of a scan at a time."""

MIN_SEGMENT_CHUNKS = 16
"""The fewest chunks of a segment."""

SEGMENT_PARTS = 8
"""The parts of a segment whose states from zeros are computed at the same time without the delta rule."""


def num_scan_blocks(record: LinearRecurrence) -> int:
    """Returns the blocks of a scan that does not split rows."""
    return record.query.shape[0] * num_state_heads(record) * (record.value.shape[3] // VALUE_CHANNELS_PER_BLOCK)


def num_segments(record: LinearRecurrence) -> int:
    """Returns the number of segments of a row: as many as there are multiprocessors for."""
    chunks = cdiv(record.query.shape[1], CHUNK)
    segments = min(HOPPER_MULTIPROCESSORS // max(1, num_scan_blocks(record)), chunks // MIN_SEGMENT_CHUNKS)
    return cdiv(chunks, cdiv(chunks, segments)) if segments > 0 else 1


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
