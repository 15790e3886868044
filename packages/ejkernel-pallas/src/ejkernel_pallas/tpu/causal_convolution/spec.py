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
        filter_width: W, weights per channel.
        block_t: Tokens per block.
        block_c: Channels per block.
        blocks_per_row: The number of blocks along a row's tokens.
        num_channel_tiles: The number of blocks along the channels.
        tokens_in_last_block: Tokens of a row's last block.
        has_silu: Whether the activation is SiLU.
        halves_convolution_sums: Whether kernels compute half of the sums, of which the activation takes the hyperbolic
            tangent.
        is_packed: Whether the row has several sequences.
        computes_first_tokens_separately: Whether the first W - 1 tokens of sequences are computed outside of the
            kernels, from the states before them.
    """

    filter_width: int
    block_t: int
    block_c: int
    blocks_per_row: int
    num_channel_tiles: int
    tokens_in_last_block: int
    has_silu: bool
    halves_convolution_sums: bool
    is_packed: bool
    computes_first_tokens_separately: bool


def make_spec(record: CausalConvolution, config: TpuConvolution) -> ConvolutionSpec:
    """Returns the constants of a record's kernels."""
    _, tokens, channels = record.x.shape
    blocks = cdiv(tokens, config.block_t)
    packed = record.cu_seqlens is not None
    return ConvolutionSpec(
        filter_width=record.weight.shape[1],
        block_t=config.block_t,
        block_c=config.block_c,
        blocks_per_row=blocks,
        num_channel_tiles=cdiv(channels, config.block_c),
        tokens_in_last_block=tokens - (blocks - 1) * config.block_t,
        has_silu=record.activation == "silu",
        # The unit's tangent has fewer digits than float32.
        halves_convolution_sums=record.activation == "silu" and record.x.dtype == jnp.bfloat16,
        is_packed=packed,
        computes_first_tokens_separately=packed or record.initial_state is not None,
    )
