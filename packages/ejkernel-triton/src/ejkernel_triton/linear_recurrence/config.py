"""Chunks, tiles and launch parameters of the linear recurrence kernels."""

import dataclasses

from ejkernel.families.linear_recurrence import LinearRecurrence, head_count
from ejkernel.ops.config.params import Direction
from ejkernel.ops.device import DeviceInfo
from ejkernel_triton.chips import chip_of
from ejkernel_triton.launch import interpreting


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChunkPasses:
    """Configuration of both passes, which share the chunks between whose states they pass.

    Attributes:
        chunk: Tokens a chunk, a power of two, at least 16.
        splits: Segments of a row whose chunks are walked at the same time, for calls of few rows and heads.
        keep_states: Whether the backward pass is given the chunk states, instead of making them again.
        state_block_k: Key channels of a tile of the state that a program passes from chunk to chunk.
        state_block_v: Value channels of it.
        state_warps: Warps of such a program.
        state_stages: Pipeline stages: chunks that are copied ahead.
        output_block_k: Key channels at once, where outputs and gradients of values are made.
        output_block_v: Value channels of a program there.
        output_warps: Warps of it.
        output_stages: Its pipeline stages.
        gradient_block_k: Key channels of a program, where gradients of queries, keys and gates are made.
        gradient_block_v: Value channels at once there.
        gradient_warps: Warps of it.
        gradient_stages: Its pipeline stages.
    """

    chunk: int
    splits: int
    keep_states: bool
    state_block_k: int
    state_block_v: int
    state_warps: int
    state_stages: int
    output_block_k: int
    output_block_v: int
    output_warps: int
    output_stages: int
    gradient_block_k: int
    gradient_block_v: int
    gradient_warps: int
    gradient_stages: int


FACES = {
    "block_q": "chunk",
    "chunk_size": "chunk",
    "block_k": "output_block_k",
    "block_d": "output_block_v",
    "num_warps": "output_warps",
    "num_stages": "output_stages",
}
"""Fields of the public configurations and what they set here."""
