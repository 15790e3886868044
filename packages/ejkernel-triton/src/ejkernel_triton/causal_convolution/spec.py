"""The compile-time constants of the causal convolution's kernels."""

import dataclasses

import jax.numpy as jnp

from ejkernel.arithmetic import cdiv
from ejkernel.families.causal_convolution import CausalConvolution
from ejkernel.ops.device import current_device
from ejkernel_triton.launch import interpreting


@dataclasses.dataclass(frozen=True, kw_only=True)
class ConvolutionSpec:
    """Constants of the kernels.

    Attributes:
        T: Tokens.
        C: Channels.
        W: Weights per channel.
        BLOCK_T: Tokens per block.
        BLOCK_C: Channels per program.
        STEPS: Blocks per program.
        STAGES: Pipeline stages of the loop over blocks.
        BLOCKS: Programs that share the tokens.
        TILES: Programs that share the channels.
        BIAS: Whether there is a bias.
        STATE: Whether there are tokens before the first.
        PACKED: Whether a row has several sequences.
        SILU: Whether the activation is SiLU.
        FINAL: Whether the backward kernel adds the final state's cotangent; otherwise XLA does.
        FAST: Whether exponentials and divisions use NVIDIA's approximate instructions.
        PAIRS: Whether two bfloat16 channels are loaded as one integer.
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
    """Returns the constants of a record's kernels; `pairs` asks to load channels as pairs where that is possible."""
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
        BLOCKS=cdiv(tokens, block_t * steps),
        TILES=cdiv(channels, block_c),
        BIAS=record.bias is not None,
        STATE=record.initial_state is not None,
        PACKED=record.cu_seqlens is not None,
        SILU=record.activation == "silu",
        FINAL=record.cu_seqlens is None and tokens >= record.weight.shape[1] - 1,
        FAST=fast,
        PAIRS=pairs and fast and record.x.dtype == jnp.bfloat16 and channels % 2 == 0,
    )
