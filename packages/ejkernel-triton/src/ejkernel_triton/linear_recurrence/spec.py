"""What the kernels of a linear recurrence are compiled for: all about a record that is neither an array nor a tile."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ejkernel.families.linear_recurrence import LinearRecurrence, head_count
from ejkernel.ops.device import current_device
from ejkernel_triton.launch import Shape, interpreting, launch
from ejkernel_triton.linear_recurrence.config import MIN_TILE, ChunkPasses
from ejkernel_triton.sizes import padded

MOST_SEQUENCES = 1023
"""Packed sequences up to which one kernel makes all that is known of their chunks."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RecurrenceSpec:
    """Constants of the kernels; the letters are those of the record.

    Attributes:
        T: Tokens of a row.
        CHUNK: Tokens of a chunk.
        LEVELS: How often a chunk is halved until its parts have one token.
        CHUNKS: Chunks of a row; of packed sequences, the most there can be.
        SEQUENCES: Sequences of a row that have states of their own: packed ones, or the segments that a long row is
            split into.
        PER_SEQUENCE: Chunks of a segment; 0 for packed sequences, whose chunks are counted in `Spans`.
        H: Heads.
        HQ: Heads of the queries.
        HK: Heads of the keys.
        HV: Heads of the values.
        K: Key channels.
        V: Value channels.
        WIDTH: Gates a head and token: 0 without gates, 1 or K.
        CONSTANT: Whether a head's gate is the same for all tokens: kernels multiply it instead of reading sums.
        DECAYED: Whether queries and keys have their decay by gates of channels already, and what takes the gates' place
            are factors of chunks, [B, H, CHUNKS, 3, K] (see `delta_channels_kernel`).
        DELTA: Whether tokens write by the delta rule.
        DT: Whether there is dt.
        SKIP: Whether there is a skip.
        SCALE: Factor on the output.
        MAX_EXPONENT: Powers of two on either side of a chunk's middle up to which its pairs with gates of channels are
            one product: those that the dtype has, and that leave digits to what is multiplied with them.
        FULL_CHUNKS: Whether every token of every chunk is one of its sequence.
        PRECISION: How Triton multiplies float32 tiles: "ieee", "tf32" or "tf32x3".
        WIDEN: Whether operands of products become float32 first: the interpreter multiplies the bits of bfloat16.
    """

    T: int
    CHUNK: int
    LEVELS: int
    CHUNKS: int
    SEQUENCES: int
    PER_SEQUENCE: int
    H: int
    HQ: int
    HK: int
    HV: int
    K: int
    V: int
    WIDTH: int
    CONSTANT: bool
    DECAYED: bool
    DELTA: bool
    DT: bool
    SKIP: bool
    SCALE: float
    MAX_EXPONENT: float
    FULL_CHUNKS: bool
    PRECISION: str
    WIDEN: bool


class Spans(NamedTuple):
    """Which tokens the chunks of packed sequences have; all are None without packing.

    Attributes:
        bounds: int32 [1, N + 2], cumulative lengths, the last twice.
        first_chunks: int32 [1, N + 1], chunks before each sequence, and all chunks.
        starts: int32 [1, CHUNKS], the first token of each chunk.
        ends: int32 [1, CHUNKS], the token behind the last of its sequence; chunks behind the last have no token.
        order: int32 [1, N], the sequences in the order in which their walks begin: the longest first, so that none
            begins when the others have ended.
    """

    bounds: jax.Array | None
    first_chunks: jax.Array | None
    starts: jax.Array | None
    ends: jax.Array | None
    order: jax.Array | None

    @property
    def of_chunks(self) -> tuple[jax.Array | None, ...]:
        """What kernels of single chunks read."""
        return self.starts, self.ends

    @property
    def of_walks(self) -> tuple[jax.Array | None, ...]:
        """What kernels read that walk along the chunks of a sequence."""
        return self.bounds, self.first_chunks, self.order


def make_spec(record: LinearRecurrence, chunk: int, splits: int = 1) -> RecurrenceSpec:
    """The constants of a record's kernels on the device in use.

    Args:
        record: The canonical arguments.
        chunk: Tokens a chunk.
        splits: Segments that a row which is not packed is split into, each walked by programs of its own.
    """
    tokens, packed = record.query.shape[1], record.cu_seqlens is not None
    chunk = max(MIN_TILE, 1 << (chunk.bit_length() - 1))
    chunks = -(-tokens // chunk)
    sequences = max(1, min(splits, chunks))
    per_sequence = -(-chunks // sequences)
    sequences = -(-chunks // per_sequence)
    if record.cu_seqlens is not None:
        sequences, per_sequence = record.cu_seqlens.shape[0] - 1, 0
        # Every sequence may end with a partial chunk. The lengths are traced, so that is the most there can be.
        chunks = tokens // chunk + min(sequences, tokens)
    return RecurrenceSpec(
        T=tokens,
        CHUNK=chunk,
        LEVELS=chunk.bit_length() - 1,
        CHUNKS=chunks,
        SEQUENCES=sequences,
        PER_SEQUENCE=per_sequence,
        H=head_count(record),
        HQ=record.query.shape[2],
        HK=record.key.shape[2],
        HV=record.value.shape[2],
        K=record.query.shape[3],
        V=record.value.shape[3],
        WIDTH=0 if record.decay is None else record.decay.shape[3],
        CONSTANT=_is_constant(record),
        DECAYED=False,
        DELTA=record.beta is not None,
        DT=record.dt is not None,
        SKIP=record.skip is not None,
        SCALE=record.softmax_scale,
        # A factor is one operand: float16 ends at 2 ** 16, and 8 powers are left to what is multiplied. Other dtypes
        # end at 2 ** 128, which a product of two factors of 2 ** 40 must not reach either.
        MAX_EXPONENT=8.0 if record.query.dtype == jnp.float16 else 40.0,
        FULL_CHUNKS=not packed and tokens % chunk == 0,
        PRECISION=_precision(record),
        WIDEN=interpreting(),
    )


def _is_constant(record: LinearRecurrence) -> bool:
    """Whether heads have gates that no token changes, as lightning attention's; kernels of the delta rule read sums."""
    return record.decay is not None and record.beta is None and record.decay.shape[1] == record.decay.shape[3] == 1


def make_spans(record: LinearRecurrence, spec: RecurrenceSpec) -> Spans:
    """Where the chunks of packed sequences lie: each sequence is cut into chunks from its first token on."""
    if record.cu_seqlens is None:
        return Spans(None, None, None, None, None)
    bounds, sequences = record.cu_seqlens.astype(jnp.int32), record.cu_seqlens.shape[0] - 1
    if 0 < sequences <= MOST_SEQUENCES:
        return Spans(*_spans_at_once(bounds[None], sequences, spec))
    return _many_spans(bounds, spec)


def _spans_at_once(cu_seqlens: jax.Array, sequences: int, spec: RecurrenceSpec) -> tuple[jax.Array, ...]:
    """The tables of `Spans` in one launch."""
    from ejkernel_triton.linear_recurrence.spans_kernel import spans_kernel

    most = padded(sequences + 1, MIN_TILE)
    entries = max(MIN_TILE, 4096 // most)
    shapes = (sequences + 2, sequences + 1, spec.CHUNKS, spec.CHUNKS, sequences)
    return launch(
        spans_kernel,
        (cu_seqlens,),
        [Shape((1, n), jnp.int32) for n in shapes],
        batch=1,
        grid=-(-max(spec.CHUNKS, sequences + 2) // entries),
        num_warps=4,
        num_stages=1,
        constants={
            "SEQUENCES": sequences,
            "CHUNK": spec.CHUNK,
            "CHUNKS": spec.CHUNKS,
            "ENTRIES": entries,
            "PADDED": most,
        },
    )


def _many_spans(bounds: jax.Array, spec: RecurrenceSpec) -> Spans:
    """The tables of `Spans` of more sequences than a program looks at at once; or of none."""
    counts = -(-jnp.diff(bounds) // spec.CHUNK)
    first_chunks = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(counts, dtype=jnp.int32)])
    chunk = jnp.arange(spec.CHUNKS, dtype=jnp.int32)
    # Few numbers: comparing all of them is one fused operation, where a binary search would be a loop. Chunks behind
    # the last have sequence N, which is empty.
    sequence = jnp.searchsorted(first_chunks[1:], chunk, side="right", method="compare_all")
    bounds = jnp.append(bounds, bounds[-1])
    starts, ends = bounds[sequence] + (chunk - first_chunks[sequence]) * spec.CHUNK, bounds[sequence + 1]
    order = jnp.argsort(-counts).astype(jnp.int32)
    return Spans(bounds[None], first_chunks[None], starts[None], ends[None], order[None])


def state_dtype(record: LinearRecurrence) -> Any:
    """In which chunk states are stored: float16 has not the range for sums over a sequence."""
    return jnp.bfloat16 if record.query.dtype == jnp.bfloat16 else jnp.float32


def canonical(record: LinearRecurrence) -> LinearRecurrence:
    """A record as the kernels take it: in float32 where products of 16-bit inputs must not be rounded between."""
    if record.precision != lax.Precision.HIGHEST or record.query.dtype == jnp.float32:
        return record
    wide = {name: getattr(record, name).astype(jnp.float32) for name in ("query", "key", "value")}
    return dataclasses.replace(record, **wide)


def _precision(record: LinearRecurrence) -> str:
    """Products of float32 keep its digits; those of states with float16 need no more than float16's."""
    if current_device().vendor != "nvidia" or record.precision == lax.Precision.HIGHEST:
        return "ieee"
    return "tf32x3" if record.query.dtype == jnp.float32 else "tf32"


@dataclasses.dataclass(frozen=True, kw_only=True)
class RecurrenceCall:
    """What the stages of one call share. B rows; the letters are those of `RecurrenceSpec`.

    Attributes:
        spec: Constants.
        config: Chunks and tiles.
        query: [B, T, HQ, K].
        key: [B, T, HK, K].
        value: [B, T, HV, V].
        gates: [B|1, H, CHUNKS * CHUNK, WIDTH] float32, from `stages.cumulative_gates`; [B|1, H] where gates are
            constant; factors of chunks where queries and keys are decayed already; None without gates.
        scores: [B, H, CHUNKS * CHUNK, CHUNK], from `stages.channel_scores`; None without gates of channels.
        dt: [B, T, H], or None.
        skip: [1, 1, H], or None.
        spans: Where the chunks of packed sequences lie.
    """

    spec: RecurrenceSpec
    config: ChunkPasses
    query: jax.Array
    key: jax.Array
    value: jax.Array
    gates: jax.Array | None
    scores: jax.Array | None
    dt: jax.Array | None
    skip: jax.Array | None
    spans: Spans
