"""The compile-time constants of the gather-reduce kernels."""

import dataclasses

from ejkernel.arithmetic import cdiv
from ejkernel.families.gather_reduce import GatherReduce
from ejkernel_triton.gather_reduce.config import GatherTiles

ZERO_FILL_BLOCK_TOKENS = 256
"""Tokens that a program checks for a missing row."""
ZERO_FILL_STEP_TOKENS = 16
"""Tokens that such a program fills at a time."""
MAX_UNROLLED_TERMS = 16
"""The largest number of terms of a sum for which its loop is unrolled, so that all loads are in flight together."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class GatherSpec:
    """Constants of both kernels.

    Attributes:
        R: Rows.
        T: Tokens.
        K: Indices per token.
        M: Pairs per row.
        D: Channels.
        HAS_WEIGHTS: Whether there are weights.
        COMPUTE_WEIGHT_GRADIENT: Whether the gradient of the weights is requested.
        UNROLL_TERMS: Whether the loop over terms is unrolled.
        BLOCK_T: Sums per program.
        NUM_BLOCKS: Programs that share the sums.
        BLOCK_D: Channels per program.
        NUM_CHANNEL_TILES: Programs that share the channels.
        ZERO_FILL_BLOCK_TOKENS: Tokens that a program of `scatter_copies_kernel` checks for a missing row.
        ZERO_FILL_STEP_TOKENS: Tokens that it fills at a time.
        NUM_ZERO_FILL_BLOCKS: Such programs that share the tokens.
    """

    R: int
    T: int
    K: int
    M: int
    D: int
    HAS_WEIGHTS: bool
    COMPUTE_WEIGHT_GRADIENT: bool
    UNROLL_TERMS: bool
    BLOCK_T: int
    NUM_BLOCKS: int
    BLOCK_D: int
    NUM_CHANNEL_TILES: int
    ZERO_FILL_BLOCK_TOKENS: int
    ZERO_FILL_STEP_TOKENS: int
    NUM_ZERO_FILL_BLOCKS: int


def make_spec(
    record: GatherReduce, config: GatherTiles, *, num_sums: int, num_terms: int, compute_weight_gradient: bool = False
) -> GatherSpec:
    """Returns the constants of a kernel that computes `num_sums` sums of `num_terms` terms."""
    (rows, channels), (tokens, count) = record.rows.shape, record.indices.shape
    return GatherSpec(
        R=rows,
        T=tokens,
        K=count,
        M=record.inverse.shape[1],
        D=channels,
        HAS_WEIGHTS=record.weights is not None,
        COMPUTE_WEIGHT_GRADIENT=compute_weight_gradient,
        UNROLL_TERMS=num_terms <= MAX_UNROLLED_TERMS,
        BLOCK_T=config.block_t,
        NUM_BLOCKS=cdiv(num_sums, config.block_t),
        BLOCK_D=config.block_d,
        NUM_CHANNEL_TILES=cdiv(channels, config.block_d),
        ZERO_FILL_BLOCK_TOKENS=ZERO_FILL_BLOCK_TOKENS,
        ZERO_FILL_STEP_TOKENS=ZERO_FILL_STEP_TOKENS,
        NUM_ZERO_FILL_BLOCKS=cdiv(tokens, ZERO_FILL_BLOCK_TOKENS),
    )
