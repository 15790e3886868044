"""The configuration that both chunked recurrences share."""

import dataclasses

MIN_TILE = 16
"""The smallest side of a tile that `tl.dot` supports, in tokens or channels."""

DEFAULT_WARPS = 4
"""Warps per program of the kernels that pass states, and of those that compute scores and the WY form."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChunkedConfig:
    """Configuration of both passes, which share the chunks whose states are stored.

    Attributes:
        chunk: Tokens per chunk of the forward pass; rounded down to a power of two, and at least 16.
        backward_chunk: Tokens per chunk of the backward pass. If it differs, the forward pass stores nothing for the
            backward pass, which recomputes gates and states.
        segments: Segments per row whose chunks are scanned in parallel, for calls of few rows and heads.
        keep_states: Whether the chunk states are stored for the backward pass; otherwise it recomputes them.
        state_block_k: Key channels per tile of the state that a program passes from chunk to chunk.
        state_block_v: Value channels per such tile.
        state_stages: Pipeline stages: chunks whose copies are in flight, plus one; the delta rule uses fewer if shared
            memory is too small.
        score_block_k: Key channels per step of the kernel that computes scores with gates per key channel.
        output_block_t: Tokens per program of the output kernel, at most a chunk; with gates per key channel a whole
            chunk.
        output_block_k: Key channels per step of the kernels of outputs and of gradients of values.
        output_block_v: Value channels per program of these kernels.
        output_warps: Warps per program of these kernels.
        output_stages: Their pipeline stages.
        gradient_block_k: Key channels per program of the kernel of gradients of queries, keys and gates.
        gradient_block_v: Value channels per step of that kernel.
        gradient_warps: Warps per program of that kernel.
        gradient_stages: Its pipeline stages.
        fused: Whether the forward pass computes states and outputs in one kernel, which stores no states; otherwise the
            `output_*` fields apply, and the `state_*` fields to all states. With gradients and `keep_states` two
            kernels run.
        fused_block_v: Value channels per program of the fused kernel; it has all key channels.
        fused_stages: Its pipeline stages.
    """

    chunk: int
    backward_chunk: int
    segments: int
    keep_states: bool
    state_block_k: int
    state_block_v: int
    state_stages: int
    score_block_k: int
    output_block_t: int
    output_block_k: int
    output_block_v: int
    output_warps: int
    output_stages: int
    gradient_block_k: int
    gradient_block_v: int
    gradient_warps: int
    gradient_stages: int
    fused: bool
    fused_block_v: int
    fused_stages: int

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if "_block_" in field.name and (value < MIN_TILE or value & (value - 1)):
                raise ValueError(f"{field.name}: got {value}, wants a power of two from {MIN_TILE} on")
