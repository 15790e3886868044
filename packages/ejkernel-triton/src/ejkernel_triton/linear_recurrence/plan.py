"""Computes what a call's kernels share: the chunks' tokens, cumulative gates, and pipeline stages that fit the chip.

Triton's compiler determines the shared memory of a kernel; `_state_passing_shared_memory_bytes` is an upper bound for
its versions 3.6 and 3.9, which a test compares with them.
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
from ejkernel_triton.launch import ShapeDtype, launch
from ejkernel_triton.linear_recurrence.config import MIN_TILE, ChunkedConfig
from ejkernel_triton.linear_recurrence.spec import RecurrenceSpec, make_spec
from ejkernel_triton.sizes import pad_to_power_of_two

MAX_SEQUENCES_PER_PROGRAM = 1023
"""The largest number of packed sequences whose chunk index one kernel computes."""


class ChunkTables(NamedTuple):
    """The index of the chunks of packed sequences; all fields are None without packing.

    Attributes:
        padded_cu_seqlens: int32 [1, N + 2], cumulative lengths, the last twice.
        chunk_offsets: int32 [1, N + 1], chunks before each sequence, and all chunks.
        chunk_starts: int32 [1, NUM_CHUNKS], the first token of each chunk.
        sequence_ends: int32 [1, NUM_CHUNKS], the end of each chunk's sequence; chunks past the last one have no token.
        sequences_by_length: int32 [1, N], the sequences in the order in which their scans start: the longest first, so
            that none starts when the others have ended.
    """

    padded_cu_seqlens: jax.Array | None
    chunk_offsets: jax.Array | None
    chunk_starts: jax.Array | None
    sequence_ends: jax.Array | None
    sequences_by_length: jax.Array | None

    @property
    def chunk_kernel_inputs(self) -> tuple[jax.Array | None, ...]:
        """Returns the inputs of kernels with a program per chunk."""
        return self.chunk_starts, self.sequence_ends

    @property
    def scan_kernel_inputs(self) -> tuple[jax.Array | None, ...]:
        """Returns the inputs of kernels that scan along the chunks of a sequence."""
        return self.padded_cu_seqlens, self.chunk_offsets, self.sequences_by_length


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
        gates: [B|1, H, NUM_CHUNKS * CHUNK_SIZE, GATE_CHANNELS] float32, from `make_gate_cumsum`; [B|1, H] where gates
            are constant; sums of chunks where queries and keys are decayed already; None without gates.
        decay: [B|1, T|1, H, K], log gates per key channel; None with other gates.
        scores: [B, H, NUM_CHUNKS * CHUNK_SIZE, CHUNK_SIZE], from `forward.intra_chunk_scores`; None without gates per
            key channel.
        dt: [B, T, H], or None.
        skip: [1, 1, H], or None.
        chunk_tables: The index of packed sequences' chunks.
    """

    spec: RecurrenceSpec
    config: ChunkedConfig
    query: jax.Array
    key: jax.Array
    value: jax.Array
    gates: jax.Array | None
    decay: jax.Array | None
    scores: jax.Array | None
    dt: jax.Array | None
    skip: jax.Array | None
    chunk_tables: ChunkTables


GATES_PER_PROGRAM = 64
"""Gates of a token that a program sums."""

MIN_WGMMA_ROWS = 64
"""Tokens per chunk from which on Hopper uses WGMMA, which reads shared memory, so that it holds every stage."""


def make_chunk_tables(record: LinearRecurrence, spec: RecurrenceSpec) -> ChunkTables:
    """Returns the index of packed sequences' chunks; each sequence is split into chunks from its first token on."""
    if record.cu_seqlens is None:
        return ChunkTables(None, None, None, None, None)
    padded_cu_seqlens, num_sequences = record.cu_seqlens.astype(jnp.int32), record.cu_seqlens.shape[0] - 1
    if 0 < num_sequences <= MAX_SEQUENCES_PER_PROGRAM:
        return ChunkTables(*_chunk_tables_in_one_launch(padded_cu_seqlens[None], num_sequences, spec))
    return _chunk_tables_of_many_sequences(padded_cu_seqlens, spec)


def _chunk_tables_in_one_launch(
    cu_seqlens: jax.Array, num_sequences: int, spec: RecurrenceSpec
) -> tuple[jax.Array, ...]:
    """Computes the tables of `ChunkTables` in one launch."""
    from ejkernel_triton.linear_recurrence.kernels.chunk_tables import chunk_tables_kernel

    padded_sequences = pad_to_power_of_two(num_sequences + 1, MIN_TILE)
    entries_per_program = max(MIN_TILE, 4096 // padded_sequences)
    shapes = (num_sequences + 2, num_sequences + 1, spec.NUM_CHUNKS, spec.NUM_CHUNKS, num_sequences)
    return launch(
        chunk_tables_kernel,
        (cu_seqlens,),
        [ShapeDtype((1, n), jnp.int32) for n in shapes],
        batch=1,
        grid=cdiv(max(spec.NUM_CHUNKS, num_sequences + 2), entries_per_program),
        num_warps=4,
        num_stages=1,
        constants={
            "NUM_SEQUENCES": num_sequences,
            "CHUNK_SIZE": spec.CHUNK_SIZE,
            "NUM_CHUNKS": spec.NUM_CHUNKS,
            "ENTRIES_PER_PROGRAM": entries_per_program,
            "PADDED_SEQUENCES": padded_sequences,
        },
    )


def _chunk_tables_of_many_sequences(padded_cu_seqlens: jax.Array, spec: RecurrenceSpec) -> ChunkTables:
    """Computes the tables of `ChunkTables` for more sequences than one program reads, or for none."""
    chunks_per_sequence = cdiv(jnp.diff(padded_cu_seqlens), spec.CHUNK_SIZE)
    chunk_offsets = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(chunks_per_sequence, dtype=jnp.int32)])
    chunk = jnp.arange(spec.NUM_CHUNKS, dtype=jnp.int32)
    # There are few elements: comparing all of them is one fused operation, where a binary search would be a loop.
    # Chunks past the last one get sequence N, which is empty.
    sequence = jnp.searchsorted(chunk_offsets[1:], chunk, side="right", method="compare_all")
    padded_cu_seqlens = jnp.append(padded_cu_seqlens, padded_cu_seqlens[-1])
    chunk_starts, sequence_ends = (
        padded_cu_seqlens[sequence] + (chunk - chunk_offsets[sequence]) * spec.CHUNK_SIZE,
        padded_cu_seqlens[sequence + 1],
    )
    sequences_by_length = jnp.argsort(-chunks_per_sequence).astype(jnp.int32)
    return ChunkTables(
        padded_cu_seqlens[None], chunk_offsets[None], chunk_starts[None], sequence_ends[None], sequences_by_length[None]
    )


def make_call(
    record: LinearRecurrence,
    config: ChunkedConfig,
    chunk: int,
    gates: jax.Array | None = None,
    scores: jax.Array | None = None,
    *,
    compute_gate_cumsum: bool = True,
) -> RecurrenceCall:
    """Returns the call of a record.

    Args:
        record: The canonical arguments.
        config: Chunks and tiles.
        chunk: Tokens per chunk, of this pass.
        gates: Cumulative gates, if the forward pass stored them.
        scores: Scores with gates per key channel, if the forward pass stored them.
        compute_gate_cumsum: Whether to compute cumulative gates if they are not passed.
    """
    spec = make_spec(record, chunk, config.segments)
    chunk_tables = make_chunk_tables(record, spec)
    if compute_gate_cumsum and gates is None:
        gates = make_gate_cumsum(record.decay, spec, chunk_tables)
    return RecurrenceCall(
        spec=spec,
        config=config,
        query=record.query,
        key=record.key,
        value=record.value,
        gates=gates,
        decay=record.decay if spec.GATE_CHANNELS > 1 else None,
        scores=scores,
        dt=record.dt,
        skip=record.skip,
        chunk_tables=chunk_tables,
    )


def make_gate_sum_matrices(call: RecurrenceCall) -> jax.Array | None:
    """Returns the matrices whose products with a chunk's gates per key channel are the sums that kernels read.

    Rows are tokens, columns the gates of the chunk's tokens. In this order:

    - the sum from the chunk's first token to each token;
    - the sum after each token, to the chunk's end;
    - the sum from the middle of each token's sub-chunk to the token, negative before it. The middle is halfway through
      the gate of the second half's first token: with four tokens a sum has at most 1.5 gates;
    - for each level the sum between each token and the cut of its block of 2 ** (level + 1) tokens, which is after the
      block's first half: for tokens after the cut the sum since it, for those before it the sum up to it.

    Returns:
        [1, 3 + LOG2_CHUNK, CHUNK_SIZE, CHUNK_SIZE], float32 for calls in float32, else bfloat16. None with other gates.
    """
    if call.decay is None:
        return None
    spec = call.spec
    dtype = jnp.float32 if call.query.dtype == jnp.float32 else jnp.bfloat16
    token, summed_token = np.ogrid[: spec.CHUNK_SIZE, : spec.CHUNK_SIZE]
    is_up_to_token = summed_token <= token
    matrices = [is_up_to_token, ~is_up_to_token]
    in_same_sub_chunk, middle = (
        token // spec.SUB_CHUNK_SIZE == summed_token // spec.SUB_CHUNK_SIZE,
        spec.SUB_CHUNK_SIZE // 2,
    )
    weight_before_middle = np.where(
        summed_token % spec.SUB_CHUNK_SIZE == middle, 0.5, summed_token % spec.SUB_CHUNK_SIZE < middle
    )
    matrices += [np.where(in_same_sub_chunk, is_up_to_token - weight_before_middle, 0.0)]
    for level in range(spec.LOG2_CHUNK):
        in_second_half = (token >> level) % 2 == 1
        matrices += [(token >> level == summed_token >> level) & (is_up_to_token == in_second_half)]
    return jnp.asarray(np.stack(matrices)[None], dtype)


def make_gate_cumsum(decay: jax.Array | None, spec: RecurrenceSpec, chunk_tables: ChunkTables) -> jax.Array | None:
    """Returns the sums of log2 gates from each chunk's first token on.

    Args:
        decay: [B|1, T|1, H, GATE_CHANNELS], or None.
        spec: Constants.
        chunk_tables: The index of packed sequences' chunks.

    Returns:
        [B|1, H, NUM_CHUNKS * CHUNK_SIZE, GATE_CHANNELS] float32; rows after a chunk's last token repeat its sum.
        [B|1, H], the log gates themselves, if they are constant. None without gates.
    """
    from ejkernel_triton.linear_recurrence.kernels.chunk_local_cumsum import chunk_local_cumsum_kernel

    if decay is None:
        return None
    if spec.HAS_CONSTANT_GATES:
        return decay[:, 0, :, 0]
    rows, columns = decay.shape[0], spec.H * spec.GATE_CHANNELS
    block = min(GATES_PER_PROGRAM, pad_to_power_of_two(columns, MIN_TILE))
    (gate_cumsum,) = launch(
        chunk_local_cumsum_kernel,
        (decay, *chunk_tables.chunk_kernel_inputs),
        [ShapeDtype((rows, spec.H, spec.NUM_CHUNKS * spec.CHUNK_SIZE, spec.GATE_CHANNELS), jnp.float32)],
        batch=rows,
        grid=rows * spec.NUM_CHUNKS * cdiv(columns, block),
        num_warps=4,
        num_stages=1,
        constants={"spec": spec, "T": decay.shape[1], "GATES_PER_PROGRAM": block},
    )
    return gate_cumsum


def state_stages(call: RecurrenceCall, max_stages: int, *, block_k: int, block_v: int, reads_v_new: bool) -> int:
    """Returns the largest number of stages with which the delta rule's state passing fits the chip in use.

    Args:
        call: What the launches of the call share.
        max_stages: The most stages.
        block_k: Key channels per tile of the state: all of them.
        block_v: Value channels per tile of the state.
        reads_v_new: Whether the tokens' writes are read, in addition to keys and `w`.
    """
    chip = gpu_of(current_device())
    fitting_stages = (
        n
        for n in range(max_stages, 1, -1)
        if _state_passing_shared_memory_bytes(call, chip, n, (block_k, block_v), reads_v_new)
        <= _usable_shared_memory_bytes(chip)
    )
    return next(fitting_stages, 1)


def _usable_shared_memory_bytes(chip: Gpu) -> int:
    return chip.shared_memory - (KIBI if chip.vendor == "nvidia" else 0)


def _state_passing_shared_memory_bytes(
    call: RecurrenceCall, chip: Gpu, stages: int, state: tuple[int, int], reads_v_new: bool
) -> int:
    """Returns the bytes of the chunks in flight and of the state, which is an operand of the product with `w`."""
    itemsize, chunk = call.query.dtype.itemsize, call.spec.CHUNK_SIZE
    block_k, block_v = state
    has_wgmma = chip.architecture in ("hopper", "blackwell")
    # On other chips the last stage goes to registers.
    num_buffers = stages if has_wgmma and chunk >= MIN_WGMMA_ROWS else stages - 1
    chunk_bytes = chunk * ((2 * block_k + (block_v if reads_v_new else 0)) * itemsize + 8)  # and gates in float32
    operand_splits = 2 if itemsize > 2 and chip.vendor == "nvidia" else 1  # float32 operands are split in two
    return num_buffers * chunk_bytes + operand_splits * block_k * block_v * itemsize
