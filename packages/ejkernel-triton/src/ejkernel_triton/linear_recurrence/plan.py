"""Computes what a call's kernels share: the chunks' tokens, cumulative gates, and pipeline stages that fit the chip.

Triton's compiler determines the shared memory of a kernel; `_bytes` is an upper bound for its versions 3.6 and 3.9,
which a test compares with them.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.arithmetic import cdiv
from ejkernel.families.linear_recurrence import LinearRecurrence
from ejkernel.ops.chips import KIBI, Gpu, gpu_of
from ejkernel.ops.device import current_device
from ejkernel_triton.launch import Shape, launch
from ejkernel_triton.linear_recurrence.config import MIN_TILE, ChunkPasses
from ejkernel_triton.linear_recurrence.spec import RecurrenceSpec, make_spec
from ejkernel_triton.sizes import (
    padded,
)

MOST_SEQUENCES = 1023
"""The largest number of packed sequences whose chunk index one kernel computes."""


class ChunkIndex(NamedTuple):
    """The index of the chunks of packed sequences; all fields are None without packing.

    Attributes:
        bounds: int32 [1, N + 2], cumulative lengths, the last twice.
        first_chunks: int32 [1, N + 1], chunks before each sequence, and all chunks.
        starts: int32 [1, CHUNKS], the first token of each chunk.
        ends: int32 [1, CHUNKS], the end of each chunk's sequence; chunks past the last one have no token.
        order: int32 [1, N], the sequences in the order in which their scans start: the longest first, so that none
            starts when the others have ended.
    """

    bounds: jax.Array | None
    first_chunks: jax.Array | None
    starts: jax.Array | None
    ends: jax.Array | None
    order: jax.Array | None

    @property
    def per_chunk(self) -> tuple[jax.Array | None, ...]:
        """Returns the inputs of kernels with a program per chunk."""
        return self.starts, self.ends

    @property
    def per_scan(self) -> tuple[jax.Array | None, ...]:
        """Returns the inputs of kernels that scan along the chunks of a sequence."""
        return self.bounds, self.first_chunks, self.order


@dataclasses.dataclass(frozen=True, kw_only=True)
class RecurrenceCall:
    """The arrays and constants that the launches of one call share, for B rows. The letters are those of
    `RecurrenceSpec`.

    Attributes:
        spec: Constants.
        config: Chunks and tiles.
        query: [B, T, HQ, K].
        key: [B, T, HK, K].
        value: [B, T, HV, V].
        gates: [B|1, H, CHUNKS * CHUNK, WIDTH] float32, from `cumulative_gates`; [B|1, H] where gates are
            constant; sums of chunks where queries and keys are decayed already; None without gates.
        decay: [B|1, T|1, H, K], log gates per key channel; None with other gates.
        scores: [B, H, CHUNKS * CHUNK, CHUNK], from `forward.intra_chunk_scores`; None without gates per key channel.
        dt: [B, T, H], or None.
        skip: [1, 1, H], or None.
        chunk_index: The index of packed sequences' chunks.
    """

    spec: RecurrenceSpec
    config: ChunkPasses
    query: jax.Array
    key: jax.Array
    value: jax.Array
    gates: jax.Array | None
    decay: jax.Array | None
    scores: jax.Array | None
    dt: jax.Array | None
    skip: jax.Array | None
    chunk_index: ChunkIndex


GATE_COLUMNS = 64
"""Gates of a token that a program sums."""

WGMMA_ROWS = 64
"""Tokens per chunk from which on Hopper uses WGMMA, which reads shared memory, so that it holds every stage."""


def make_chunk_index(record: LinearRecurrence, spec: RecurrenceSpec) -> ChunkIndex:
    """Returns the index of packed sequences' chunks; each sequence is split into chunks from its first token on."""
    if record.cu_seqlens is None:
        return ChunkIndex(None, None, None, None, None)
    bounds, sequences = record.cu_seqlens.astype(jnp.int32), record.cu_seqlens.shape[0] - 1
    if 0 < sequences <= MOST_SEQUENCES:
        return ChunkIndex(*_index_in_one_launch(bounds[None], sequences, spec))
    return _index_of_many_sequences(bounds, spec)


def _index_in_one_launch(cu_seqlens: jax.Array, sequences: int, spec: RecurrenceSpec) -> tuple[jax.Array, ...]:
    """Computes the tables of `ChunkIndex` in one launch."""
    from ejkernel_triton.linear_recurrence.kernels.chunk_index import chunk_index_kernel

    most = padded(sequences + 1, MIN_TILE)
    entries = max(MIN_TILE, 4096 // most)
    shapes = (sequences + 2, sequences + 1, spec.CHUNKS, spec.CHUNKS, sequences)
    return launch(
        chunk_index_kernel,
        (cu_seqlens,),
        [Shape((1, n), jnp.int32) for n in shapes],
        batch=1,
        grid=cdiv(max(spec.CHUNKS, sequences + 2), entries),
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


def _index_of_many_sequences(bounds: jax.Array, spec: RecurrenceSpec) -> ChunkIndex:
    """Computes the tables of `ChunkIndex` for more sequences than one program reads, or for none."""
    counts = cdiv(jnp.diff(bounds), spec.CHUNK)
    first_chunks = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(counts, dtype=jnp.int32)])
    chunk = jnp.arange(spec.CHUNKS, dtype=jnp.int32)
    # There are few elements: comparing all of them is one fused operation, where a binary search would be a loop.
    # Chunks past the last one get sequence N, which is empty.
    sequence = jnp.searchsorted(first_chunks[1:], chunk, side="right", method="compare_all")
    bounds = jnp.append(bounds, bounds[-1])
    starts, ends = bounds[sequence] + (chunk - first_chunks[sequence]) * spec.CHUNK, bounds[sequence + 1]
    order = jnp.argsort(-counts).astype(jnp.int32)
    return ChunkIndex(bounds[None], first_chunks[None], starts[None], ends[None], order[None])


def make_call(
    record: LinearRecurrence,
    config: ChunkPasses,
    chunk: int,
    gates: jax.Array | None = None,
    scores: jax.Array | None = None,
    *,
    cumulative: bool = True,
) -> RecurrenceCall:
    """Returns the call of a record.

    Args:
        record: The canonical arguments.
        config: Chunks and tiles.
        chunk: Tokens per chunk, of this pass.
        gates: Cumulative gates, if the forward pass stored them.
        scores: Scores with gates per key channel, if the forward pass stored them.
        cumulative: Whether to compute cumulative gates if they are not passed.
    """
    spec = make_spec(record, chunk, config.segments)
    chunk_index = make_chunk_index(record, spec)
    if cumulative and gates is None:
        gates = cumulative_gates(record.decay, spec, chunk_index)
    return RecurrenceCall(
        spec=spec,
        config=config,
        query=record.query,
        key=record.key,
        value=record.value,
        gates=gates,
        decay=record.decay if spec.WIDTH > 1 else None,
        scores=scores,
        dt=record.dt,
        skip=record.skip,
        chunk_index=chunk_index,
    )


def gate_signs(call: RecurrenceCall) -> jax.Array | None:
    """Returns the matrices whose products with a chunk's gates per key channel are the sums that kernels read.

    Rows are tokens, columns the gates of the chunk's tokens. In this order:

    - the sum from the chunk's first token to each token;
    - the sum after each token, to the chunk's end;
    - the sum from the middle of each token's sub-chunk to the token, negative before it. The middle is halfway through
      the gate of the second half's first token: with four tokens a sum has at most 1.5 gates;
    - for each level the sum between each token and the cut of its block of 2 ** (level + 1) tokens, which is after the
      block's first half: for tokens after the cut the sum since it, for those before it the sum up to it.

    Returns:
        [1, 3 + LEVELS, CHUNK, CHUNK], float32 for calls in float32, else bfloat16. None with other gates.
    """
    if call.decay is None:
        return None
    spec = call.spec
    dtype = jnp.float32 if call.query.dtype == jnp.float32 else jnp.bfloat16
    token, summed = np.ogrid[: spec.CHUNK, : spec.CHUNK]
    since_start = summed <= token
    matrices = [since_start, ~since_start]
    inside, middle = token // spec.SUB_CHUNK == summed // spec.SUB_CHUNK, spec.SUB_CHUNK // 2
    to_middle = np.where(summed % spec.SUB_CHUNK == middle, 0.5, summed % spec.SUB_CHUNK < middle)
    matrices += [np.where(inside, since_start - to_middle, 0.0)]
    for level in range(spec.LEVELS):
        later = (token >> level) % 2 == 1
        matrices += [(token >> level == summed >> level) & (since_start == later)]
    return jnp.asarray(np.stack(matrices)[None], dtype)


def cumulative_gates(decay: jax.Array | None, spec: RecurrenceSpec, chunk_index: ChunkIndex) -> jax.Array | None:
    """Returns the sums of log2 gates from each chunk's first token on.

    Args:
        decay: [B|1, T|1, H, WIDTH], or None.
        spec: Constants.
        chunk_index: The index of packed sequences' chunks.

    Returns:
        [B|1, H, CHUNKS * CHUNK, WIDTH] float32; rows after a chunk's last token repeat its sum.
        [B|1, H], the log gates themselves, if they are constant. None without gates.
    """
    from ejkernel_triton.linear_recurrence.kernels.chunk_local_cumsum import chunk_local_cumsum_kernel

    if decay is None:
        return None
    if spec.CONSTANT:
        return decay[:, 0, :, 0]
    rows, columns = decay.shape[0], spec.H * spec.WIDTH
    block = min(GATE_COLUMNS, padded(columns, MIN_TILE))
    (cumulative,) = launch(
        chunk_local_cumsum_kernel,
        (decay, *chunk_index.per_chunk),
        [Shape((rows, spec.H, spec.CHUNKS * spec.CHUNK, spec.WIDTH), jnp.float32)],
        batch=rows,
        grid=rows * spec.CHUNKS * cdiv(columns, block),
        num_warps=4,
        num_stages=1,
        constants={"spec": spec, "T": decay.shape[1], "BLOCK": block},
    )
    return cumulative


def state_stages(call: RecurrenceCall, most: int, *, block_k: int, block_v: int, written: bool) -> int:
    """Returns the largest number of stages with which the delta rule's state passing fits the chip in use.

    Args:
        call: What the launches of the call share.
        most: The most stages.
        block_k: Key channels per tile of the state: all of them.
        block_v: Value channels per tile of the state.
        written: Whether the tokens' writes are read, in addition to keys and `w`.
    """
    chip = gpu_of(current_device())
    fitting = (n for n in range(most, 1, -1) if _bytes(call, chip, n, (block_k, block_v), written) <= _room(chip))
    return next(fitting, 1)


def _room(chip: Gpu) -> int:
    return chip.shared_memory - (KIBI if chip.vendor == "nvidia" else 0)


def _bytes(call: RecurrenceCall, chip: Gpu, stages: int, state: tuple[int, int], written: bool) -> int:
    """Returns the bytes of the chunks in flight and of the state, which is an operand of the product with `w`."""
    size, chunk = call.query.dtype.itemsize, call.spec.CHUNK
    block_k, block_v = state
    unit = chip.architecture in ("hopper", "blackwell")
    # On other chips the last stage goes to registers.
    buffers = stages if unit and chunk >= WGMMA_ROWS else stages - 1
    of_chunk = chunk * ((2 * block_k + (block_v if written else 0)) * size + 8)  # and gates in float32
    parts = 2 if size > 2 and chip.vendor == "nvidia" else 1  # float32 operands are split in two
    return buffers * of_chunk + parts * block_k * block_v * size
