"""The configuration of the linear recurrence's kernels: the heuristic, and the candidates that are worth measuring."""

import dataclasses
from typing import Any

from ejkernel.arithmetic import cdiv
from ejkernel.families.linear_recurrence import (
    LinearRecurrence,
    has_decay_per_channel,
    num_state_heads,
    slotted_states,
)
from ejkernel.ops.chips import TPUS
from ejkernel.ops.params import Direction

MIN_CHUNK_TOKENS = 8
"""Tokens of the shortest chunk whose tokens are rows of a product: the rows of a register."""
MAX_STEP_TOKENS = 4
"""Tokens of the longest chunk that is computed token by token, which more tokens would take longer than products."""
CANDIDATE_CHUNK_TOKENS = (32, 64, 128, 256)
CANDIDATE_HEADS_PER_STEP = (1, 2, 4, 8, 16)
MAX_STATES_VMEM_BYTES = 24 * 2**20
"""Bytes of VMEM for the states of a step's heads: one kept between chunks, and two blocks each read and written."""
MAX_CHUNK_TABLE_SMEM_BYTES = 2**20 - 2**16
"""Bytes of SMEM for the table of chunks: a chip has 1 MiB, of which the compiler and the pipeline take some."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TpuRecurrence:
    """The configuration of either pass.

    Attributes:
        chunk_size: Tokens per chunk, a power of two. Chunks of fewer than 8 tokens are computed token by token, where
            states in slots are updated; other calls have chunks of at least 8.
        heads: The largest number of heads that a grid step computes, one after another.
    """

    chunk_size: int
    heads: int

    def __post_init__(self) -> None:
        if self.chunk_size < 1 or self.chunk_size & (self.chunk_size - 1):
            raise ValueError(f"chunk_size: got {self.chunk_size}, wants a power of two")
        if self.heads < 1:
            raise ValueError(f"heads: got {self.heads}, wants at least 1")


PUBLIC_FIELDS = {"chunk_size": "chunk_size", "block_q": "chunk_size"}
"""Maps fields of the public configurations to fields of this one."""


def heuristic(record: LinearRecurrence, device: Any, direction: Direction) -> TpuRecurrence:
    """Returns the default configuration for a record, not measured: the best prediction of the profile for v5e.

    With gates per key channel there is a product for every level of a chunk, so their chunks are shorter. More heads
    fill the matrix unit better, and need more VMEM for what does not fit registers.
    """
    wide = has_channel_gates(record) or record.value_decay is not None
    length, heads = (64, 8) if wide else (128, 16)
    if slotted_states(record) is not None:  # a step's overhead is a large share of copying the states of few heads
        heads = CANDIDATE_HEADS_PER_STEP[-1]
    heads = heads if direction == "forward" else heads // 2
    length = min(length, _max_chunk_length(record, direction))
    return TpuRecurrence(chunk_size=length, heads=_use_all_cores(record, device, heads))


def candidates(record: LinearRecurrence, device: Any, direction: Direction) -> tuple[TpuRecurrence, ...]:
    """Returns configurations worth measuring."""
    first = heuristic(record, device, direction)
    lengths = [n for n in CANDIDATE_CHUNK_TOKENS if n <= _max_chunk_length(record, direction)] or [first.chunk_size]
    found = (TpuRecurrence(chunk_size=n, heads=heads) for n in lengths for heads in CANDIDATE_HEADS_PER_STEP)
    return tuple(dict.fromkeys((first, *found)))


def state_vmem_bytes_per_head(record: LinearRecurrence) -> int:
    """Returns the bytes of VMEM for the states of one head."""
    return 5 * 4 * record.query.shape[3] * record.value.shape[3]


def chunk_table_smem_bytes(record: LinearRecurrence) -> int:
    """Returns the bytes of SMEM for the table of chunks with the heuristic's chunks."""
    rows, tokens = record.query.shape[:2]
    chunk = min(heuristic(record, None, "forward").chunk_size, heuristic(record, None, "backward").chunk_size)
    sequences = 0 if record.cu_seqlens is None else record.cu_seqlens.shape[0] - 1
    return 4 * rows * (cdiv(tokens, chunk) + sequences)


def updates_slots(record: LinearRecurrence) -> bool:
    """Returns whether the forward kernel updates the slots of a record in place."""
    return slotted_states(record) is not None and not record.transposed_states


def has_channel_gates(record: LinearRecurrence) -> bool:
    """Returns whether the kernels read a gate per key channel: also with a low-rank term, whose gates are repeated."""
    return has_decay_per_channel(record) or (record.decay is not None and record.low_rank_read is not None)


def _use_all_cores(record: LinearRecurrence, device: Any, heads: int) -> int:
    """Returns the heads per step, at most half of all where one row has to fill two cores."""
    cores = next((chip.cores for chip in TPUS.values() if device is not None and chip.kind == device.kind), 1)
    return min(heads, max(1, num_state_heads(record) // cores)) if record.query.shape[0] < cores else heads


def _max_chunk_length(record: LinearRecurrence, direction: Direction) -> int:
    """Returns the longest chunk that is not mostly padding."""
    tokens = record.query.shape[1]
    if slotted_states(record) is not None and record.cu_seqlens is not None:
        # Decode steps have few tokens a sequence; in a mixed batch, most chunks are of those.
        tokens = cdiv(tokens, max(1, record.cu_seqlens.shape[0] - 1))
        length = 1 << (tokens - 1).bit_length()
        if direction == "forward" and updates_slots(record) and length <= MAX_STEP_TOKENS:
            return length
        return max(MIN_CHUNK_TOKENS, length)
    return max(16, 1 << (tokens - 1).bit_length())
