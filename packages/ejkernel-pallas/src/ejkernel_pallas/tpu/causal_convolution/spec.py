"""The compile-time constants of the causal convolution's kernels."""

import dataclasses

import jax.numpy as jnp

from ejkernel.arithmetic import cdiv
from ejkernel.families.causal_convolution import CausalConvolution
from ejkernel_pallas.tpu.causal_convolution.config import TpuConvolution


@dataclasses.dataclass(frozen=True, kw_only=True)
class ConvolutionSpec:
    """Constants of a kernel.

    Attributes:
        width: W.
        block_t: Tokens of a block.
        block_c: Channels of a block.
        blocks: Blocks along a row's tokens.
        tiles: Blocks along the channels.
        tail: Tokens of the last block.
        silu: Whether the activation is SiLU.
        halves_sums: Whether kernels compute half of the sums, for an activation by way of the hyperbolic tangent.
        packed: Whether the row holds several sequences.
        separate_first: Whether the first W - 1 tokens of sequences are computed outside of the kernels, from the
            states before them.
    """

    width: int
    block_t: int
    block_c: int
    blocks: int
    tiles: int
    tail: int
    silu: bool
    halves_sums: bool
    packed: bool
    separate_first: bool


def make_spec(record: CausalConvolution, config: TpuConvolution) -> ConvolutionSpec:
    """Returns the constants of a record's kernels."""
    _, tokens, channels = record.x.shape
    blocks = cdiv(tokens, config.block_t)
    packed = record.cu_seqlens is not None
    return ConvolutionSpec(
        width=record.weight.shape[1],
        block_t=config.block_t,
        block_c=config.block_c,
        blocks=blocks,
        tiles=cdiv(channels, config.block_c),
        tail=tokens - (blocks - 1) * config.block_t,
        silu=record.activation == "silu",
        # The unit's tangent has fewer digits than float32.
        halves_sums=record.activation == "silu" and record.x.dtype == jnp.bfloat16,
        packed=packed,
        separate_first=packed or record.initial_state is not None,
    )
