"""What the causal convolution's kernels are compiled for."""

import dataclasses

import jax.numpy as jnp

from ejkernel.families.causal_convolution import CausalConvolution
from ejkernel.ops.device import current_device
from ejkernel_triton.launch import interpreting
from ejkernel_triton.sizes import ceil_div


@dataclasses.dataclass(frozen=True, kw_only=True)
class ConvolutionSpec:
    """Constants of the kernels.

    Attributes:
        T: Tokens.
        C: Channels.
        W: Weights of a channel.
        BLOCK_T: Tokens of a block.
        BLOCK_C: Channels of a program.
        STEPS: Blocks of a program.
        STAGES: Depth of its software pipeline.
        BLOCKS: Programs that share the tokens.
        TILES: Programs that share the channels.
        BIAS: Whether there is a bias.
        STATE: Whether there are tokens before the first.
        PACKED: Whether the row holds several sequences.
        SILU: Whether the activation is SiLU.
        FINAL: Whether the backward kernel adds the final state's cotangent, which XLA does otherwise.
        FAST: Whether its exponentials and divisions are NVIDIA's instructions as they are.
        PAIRS: Whether two channels in bfloat16 are loaded as one number.
    """

    T: int
    C: int
    W: int
    BLOCK_T: int
    BLOCK_C: int
    STEPS: int
    STAGES: int
    BLOCKS: int
    TILES: int
    BIAS: bool
    STATE: bool
    PACKED: bool
    SILU: bool
    FINAL: bool
    FAST: bool
    PAIRS: bool


def make_spec(
    record: CausalConvolution, block_t: int, block_c: int, steps: int, *, stages: int = 1, pairs: bool = False
) -> ConvolutionSpec:
    """The constants of a record's kernels; `pairs` is whether they are to load channels as pairs where they can."""
    _, tokens, channels = record.x.shape
    fast = current_device().vendor == "nvidia" and not interpreting()
    return ConvolutionSpec(
        T=tokens,
        C=channels,
        W=record.weight.shape[1],
        BLOCK_T=block_t,
        BLOCK_C=block_c,
        STEPS=steps,
        STAGES=stages,
        BLOCKS=ceil_div(tokens, block_t * steps),
        TILES=ceil_div(channels, block_c),
        BIAS=record.bias is not None,
        STATE=record.initial_state is not None,
        PACKED=record.cu_seqlens is not None,
        SILU=record.activation == "silu",
        FINAL=record.cu_seqlens is None and tokens >= record.weight.shape[1] - 1,
        FAST=fast,
        PAIRS=pairs and fast and record.x.dtype == jnp.bfloat16 and channels % 2 == 0,
    )
