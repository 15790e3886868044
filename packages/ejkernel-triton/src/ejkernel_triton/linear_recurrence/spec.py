"""The compile-time constants of the kernels of a linear recurrence."""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import lax

from ejkernel.arithmetic import cdiv
from ejkernel.families.linear_recurrence import LinearRecurrence, num_state_heads
from ejkernel.ops.device import current_device
from ejkernel_triton.launch import is_interpreting
from ejkernel_triton.linear_recurrence.config import MIN_TILE

SUB_CHUNK_SIZE = 4
"""Tokens whose pairs are one product with gates per key channel: factors are within 2 ** +-87, since gates are at least
-58 powers of two.
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RecurrenceSpec:
    """Constants of the kernels; the letters are those of the record.

    Attributes:
        T: Tokens per row.
        CHUNK_SIZE: Tokens per chunk.
        LOG2_CHUNK: How often a chunk is halved until one token is left: log2 of CHUNK_SIZE.
        NUM_CHUNKS: Chunks per row; with packed sequences, an upper bound.
        NUM_SEQUENCES: Sequences per row with separate states: packed ones, or the segments that a long row is split
            into.
        CHUNKS_PER_SEGMENT: Chunks per segment; 0 for packed sequences, whose chunks are counted in `ChunkTables`.
        H: Heads.
        HQ: Heads of the queries.
        HK: Heads of the keys.
        HV: Heads of the values.
        K: Key channels.
        V: Value channels.
        GATE_CHANNELS: Gates per head and token: 0 without gates, 1 or K.
        HAS_CONSTANT_GATES: Whether a head's gate is the same for all tokens: kernels multiply it instead of loading
            sums.
        QK_ARE_DECAYED: Whether queries and keys already have their decay by gates per key channel; the gates are then
            replaced by sums of chunks, [B, H, NUM_CHUNKS, K] (see `wy_channel_gates`).
        HAS_DELTA_RULE: Whether tokens write by the delta rule.
        HAS_DT: Whether there is dt.
        HAS_SKIP: Whether there is a skip.
        OUTPUT_SCALE: Factor on the output.
        MAX_LOG2_DECAY_FROM_MIDDLE: Largest log2 decay relative to a chunk's middle for which its scores with gates per
            key channel are one product: within the dtype's range, with a margin for the operands; not with the delta
            rule.
        SUB_CHUNK_SIZE: Tokens per sub-chunk of the delta rule, whose pairs are one product with gates per key channel.
        LOG2_SUB_CHUNK: How often a sub-chunk is halved until one token is left: log2 of SUB_CHUNK_SIZE.
        ALL_CHUNKS_FULL: Whether every chunk is full.
        PRECISION: How Triton multiplies float32 tiles: "ieee", "tf32" or "tf32x3".
        WIDEN_TO_FLOAT32: Whether operands are converted first: the interpreter multiplies the bits of bfloat16.
    """

    T: int
    CHUNK_SIZE: int
    LOG2_CHUNK: int
    NUM_CHUNKS: int
    NUM_SEQUENCES: int
    CHUNKS_PER_SEGMENT: int
    H: int
    HQ: int
    HK: int
    HV: int
    K: int
    V: int
    GATE_CHANNELS: int
    HAS_CONSTANT_GATES: bool
    QK_ARE_DECAYED: bool
    HAS_DELTA_RULE: bool
    HAS_DT: bool
    HAS_SKIP: bool
    OUTPUT_SCALE: float
    MAX_LOG2_DECAY_FROM_MIDDLE: float
    SUB_CHUNK_SIZE: int
    LOG2_SUB_CHUNK: int
    ALL_CHUNKS_FULL: bool
    PRECISION: str
    WIDEN_TO_FLOAT32: bool


def make_spec(record: LinearRecurrence, chunk: int, segments: int = 1) -> RecurrenceSpec:
    """Returns the constants of a record's kernels on the device in use.

    Args:
        record: The canonical arguments.
        chunk: Tokens of a chunk.
        segments: Segments that a row without packing is split into, each scanned by separate programs.
    """
    tokens, is_float16 = record.query.shape[1], record.query.dtype == jnp.float16
    chunk = max(MIN_TILE, 1 << (chunk.bit_length() - 1))
    chunks = cdiv(tokens, chunk)
    per_sequence = cdiv(chunks, max(1, min(segments, chunks)))
    sequences = cdiv(chunks, per_sequence)
    if record.cu_seqlens is not None:
        sequences, per_sequence = record.cu_seqlens.shape[0] - 1, 0
        # Every sequence may end with a partial chunk. The lengths are traced, so this is an upper bound.
        chunks = tokens // chunk + min(sequences, tokens)
    return RecurrenceSpec(
        T=tokens,
        CHUNK_SIZE=chunk,
        LOG2_CHUNK=chunk.bit_length() - 1,
        NUM_CHUNKS=chunks,
        NUM_SEQUENCES=sequences,
        CHUNKS_PER_SEGMENT=per_sequence,
        H=num_state_heads(record),
        HQ=record.query.shape[2],
        HK=record.key.shape[2],
        HV=record.value.shape[2],
        K=record.query.shape[3],
        V=record.value.shape[3],
        GATE_CHANNELS=0 if record.decay is None else record.decay.shape[3],
        HAS_CONSTANT_GATES=_has_constant_gates(record),
        QK_ARE_DECAYED=False,
        HAS_DELTA_RULE=record.beta is not None,
        HAS_DT=record.dt is not None,
        HAS_SKIP=record.skip is not None,
        OUTPUT_SCALE=record.softmax_scale,
        # A factor is an operand: float16's largest number is 2 ** 16, and 8 powers are left to the other factor. For
        # other dtypes a product of two factors of 2 ** 40 must stay below 2 ** 128.
        MAX_LOG2_DECAY_FROM_MIDDLE=8.0 if is_float16 else 40.0,
        # In float16 the factors of four tokens overflow, so chunks are halved down to single tokens.
        SUB_CHUNK_SIZE=1 if is_float16 else SUB_CHUNK_SIZE,
        LOG2_SUB_CHUNK=0 if is_float16 else SUB_CHUNK_SIZE.bit_length() - 1,
        ALL_CHUNKS_FULL=record.cu_seqlens is None and tokens % chunk == 0,
        PRECISION=_precision(record),
        WIDEN_TO_FLOAT32=is_interpreting(),
    )


def _has_constant_gates(record: LinearRecurrence) -> bool:
    """Returns whether a head's gate is the same for all tokens, as in lightning attention; the delta rule's kernels
    use sums.
    """
    return record.decay is not None and record.beta is None and record.decay.shape[1] == record.decay.shape[3] == 1


def state_dtype(record: LinearRecurrence) -> Any:
    """Returns the dtype of stored chunk states: float16's range is too small for sums over a sequence."""
    return jnp.bfloat16 if record.query.dtype == jnp.bfloat16 else jnp.float32


def cast_to_compute_dtype(record: LinearRecurrence) -> LinearRecurrence:
    """Returns the record with query, key and value in the kernels' dtype: float32 if intermediate products of 16-bit
    inputs must not be rounded.
    """
    if record.precision != lax.Precision.HIGHEST or record.query.dtype == jnp.float32:
        return record
    wide = {name: getattr(record, name).astype(jnp.float32) for name in ("query", "key", "value")}
    return dataclasses.replace(record, **wide)


def _precision(record: LinearRecurrence) -> str:
    """Returns the precision of float32 products: it keeps all digits, but products with float16 need no more than
    float16's.
    """
    if current_device().vendor != "nvidia" or record.precision == lax.Precision.HIGHEST:
        return "ieee"
    return "tf32x3" if record.query.dtype == jnp.float32 else "tf32"
