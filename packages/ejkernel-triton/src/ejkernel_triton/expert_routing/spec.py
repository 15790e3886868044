"""The compile-time constants of the expert routing kernels."""

import dataclasses

from ejkernel.arithmetic import cdiv
from ejkernel.families.expert_routing import ExpertRouting
from ejkernel_triton.expert_routing.config import RoutingTiles
from ejkernel_triton.sizes import pad_to_power_of_two

COUNTS_PER_STEP = 4096
"""Counts that a program of `expert_offsets_kernel` adds up at a time, with eight warps."""
BLOCK_E = 8
"""Experts per program: with all of them in one program the kernel took 22 us of a layer on an H200."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RoutingSpec:
    """Constants of the kernels.

    Attributes:
        T: Tokens.
        E: Experts.
        K: Experts per token.
        PADDED_E: E, padded to a power of two.
        PADDED_K: K, padded to a power of two.
        BLOCK_T: Tokens per program.
        NUM_BLOCKS: Programs that share the tokens.
        BLOCK_E: Experts per program of `expert_offsets_kernel`.
        BLOCKS_PER_STEP: Blocks whose counts are added up at a time.
    """

    T: int
    E: int
    K: int
    PADDED_E: int
    PADDED_K: int
    BLOCK_T: int
    NUM_BLOCKS: int
    BLOCK_E: int
    BLOCKS_PER_STEP: int


def make_spec(record: ExpertRouting, config: RoutingTiles) -> RoutingSpec:
    """Returns the constants of a record's kernels."""
    (tokens, experts), top_k = record.logits.shape, record.top_k
    blocks = cdiv(tokens, config.block_t)
    return RoutingSpec(
        T=tokens,
        E=experts,
        K=top_k,
        PADDED_E=pad_to_power_of_two(experts),
        PADDED_K=pad_to_power_of_two(top_k),
        BLOCK_T=config.block_t,
        NUM_BLOCKS=blocks,
        BLOCK_E=min(BLOCK_E, pad_to_power_of_two(experts)),
        BLOCKS_PER_STEP=min(pad_to_power_of_two(blocks), COUNTS_PER_STEP // BLOCK_E),
    )
