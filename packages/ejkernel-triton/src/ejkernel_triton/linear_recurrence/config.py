"""Configuration that both chunked recurrences share."""

import dataclasses

MIN_TILE = 16
"""Smallest side of a tile that `tl.dot` takes, in tokens or channels."""

WARPS = 4
"""Warps of a program where states are passed from chunk to chunk, and where scores and the WY form are computed."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChunkPasses:
    """Configuration of both passes, which share the chunks between whose states they pass.

    Attributes:
        chunk: Tokens of a chunk of the forward pass; lowered to a power of two, and raised to 16.
        backward_chunk: Tokens of a chunk of the backward pass. Where it is another, nothing is kept for the backward
            pass, which makes gates and states again.
        segments: Segments of a row whose chunks are scanned at the same time, for calls of few rows and heads.
        keep_states: Whether the backward pass is given the chunk states, instead of making them again.
        state_block_k: Key channels of a tile of the state that a program passes from chunk to chunk.
        state_block_v: Value channels of it.
        state_stages: Pipeline stages: chunks whose copies are in flight, plus one; in the delta rule fewer where shared
            memory has no room for as many.
        score_block_k: Key channels at once, where the scores of pairs of tokens with gates per key channel are made.
        output_block_t: Tokens of a program that makes outputs, at most a chunk; with gates per key channel always that.
        output_block_k: Key channels at once, where outputs and gradients of values are made.
        output_block_v: Value channels of a program there.
        output_warps: Warps of it.
        output_stages: Its pipeline stages.
        gradient_block_k: Key channels of a program, where gradients of queries, keys and gates are made.
        gradient_block_v: Value channels at once there.
        gradient_warps: Warps of it.
        gradient_stages: Its pipeline stages.
        fused: Whether one kernel makes states and outputs forwards, with no state in memory; else `output_*` count, and
            `state_*` do for more than segments. With gradients and `keep_states` two kernels do.
        fused_block_v: Value channels of a program that scans; it has all key channels.
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
