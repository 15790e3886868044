"""The compile-time constants of the gather-reduce kernels."""

import dataclasses

from ejkernel.arithmetic import cdiv
from ejkernel.families.gather_reduce import GatherReduce
from ejkernel_triton.gather_reduce.config import GatherTiles

EMPTY_T = 256
"""Tokens that a program checks for a missing row."""
EMPTY_STEP = 16
"""Tokens that such a program fills at a time."""
UNROLLED = 16
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
        WEIGHTS: Whether there are weights.
        DOTS: Whether the gradient of the weights is requested.
        UNROLL: Whether the loop over terms is unrolled.
        BLOCK_T: Sums per program.
        BLOCKS: Programs that share the sums.
        BLOCK_D: Channels per program.
        TILES: Programs that share the channels.
        EMPTY_T: Tokens that a program of `scatter_copies_kernel` checks for a missing row.
        EMPTY_STEP: Tokens that it fills at a time.
        EMPTY_BLOCKS: Such programs that share the tokens.
    """

    R: int
    T: int
    K: int
    M: int
    D: int
    WEIGHTS: bool
    DOTS: bool
    UNROLL: bool
    BLOCK_T: int
    BLOCKS: int
    BLOCK_D: int
    TILES: int
    EMPTY_T: int
    EMPTY_STEP: int
    EMPTY_BLOCKS: int


def make_spec(record: GatherReduce, config: GatherTiles, *, sums: int, terms: int, dots: bool = False) -> GatherSpec:
    """Returns the constants of a kernel that computes `sums` sums of `terms` terms."""
    (rows, channels), (tokens, count) = record.rows.shape, record.indices.shape
    return GatherSpec(
        R=rows,
        T=tokens,
        K=count,
        M=record.inverse.shape[1],
        D=channels,
        WEIGHTS=record.weights is not None,
        DOTS=dots,
        UNROLL=terms <= UNROLLED,
        BLOCK_T=config.block_t,
        BLOCKS=cdiv(sums, config.block_t),
        BLOCK_D=config.block_d,
        TILES=cdiv(channels, config.block_d),
        EMPTY_T=EMPTY_T,
        EMPTY_STEP=EMPTY_STEP,
        EMPTY_BLOCKS=cdiv(tokens, EMPTY_T),
    )
