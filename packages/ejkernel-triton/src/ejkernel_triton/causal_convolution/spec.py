"""The compile-time constants of the causal convolution's kernels."""

import dataclasses

import jax.numpy as jnp

from ejkernel.arithmetic import cdiv
from ejkernel.families.causal_convolution import CausalConvolution
from ejkernel.ops.device import current_device
from ejkernel_triton.launch import is_interpreting


@dataclasses.dataclass(frozen=True, kw_only=True)
class ConvolutionSpec:
    """Constants of the kernels.

    Attributes:
        T: Tokens.
        C: Channels.
        W: Weights per channel.
        BLOCK_T: Tokens per block.
        BLOCK_C: Channels per program.
        BLOCKS_PER_PROGRAM: Blocks per program.
        NUM_STAGES: Pipeline stages of the loop over blocks.
        NUM_TOKEN_PROGRAMS: Programs that share the tokens.
        NUM_CHANNEL_TILES: Programs that share the channels.
        HAS_BIAS: Whether there is a bias.
        HAS_INITIAL_STATE: Whether there are tokens before the first.
        IS_PACKED: Whether a row has several sequences.
        APPLY_SILU: Whether the activation is SiLU.
        ADD_FINAL_COTANGENT: Whether the backward kernel adds the final state's cotangent; otherwise XLA does.
        USES_FAST_MATH: Whether exponentials and divisions use NVIDIA's approximate instructions.
        LOAD_CHANNEL_PAIRS: Whether two bfloat16 channels are loaded as one integer.
    """

    T: int
    C: int
    W: int
    BLOCK_T: int
    BLOCK_C: int
    BLOCKS_PER_PROGRAM: int
    NUM_STAGES: int
    NUM_TOKEN_PROGRAMS: int
    NUM_CHANNEL_TILES: int
    HAS_BIAS: bool
    HAS_INITIAL_STATE: bool
    IS_PACKED: bool
    APPLY_SILU: bool
    ADD_FINAL_COTANGENT: bool
    USES_FAST_MATH: bool
    LOAD_CHANNEL_PAIRS: bool


def make_spec(
    record: CausalConvolution,
    block_t: int,
    block_c: int,
    blocks_per_program: int,
    *,
    num_stages: int = 1,
    load_channel_pairs: bool = False,
) -> ConvolutionSpec:
    """Returns the constants of a record's kernels; `load_channel_pairs` asks to load channels as pairs where that is
    possible.
    """
    _, tokens, channels = record.x.shape
    fast = current_device().vendor == "nvidia" and not is_interpreting()
    return ConvolutionSpec(
        T=tokens,
        C=channels,
        W=record.weight.shape[1],
        BLOCK_T=block_t,
        BLOCK_C=block_c,
        BLOCKS_PER_PROGRAM=blocks_per_program,
        NUM_STAGES=num_stages,
        NUM_TOKEN_PROGRAMS=cdiv(tokens, block_t * blocks_per_program),
        NUM_CHANNEL_TILES=cdiv(channels, block_c),
        HAS_BIAS=record.bias is not None,
        HAS_INITIAL_STATE=record.initial_state is not None,
        IS_PACKED=record.cu_seqlens is not None,
        APPLY_SILU=record.activation == "silu",
        ADD_FINAL_COTANGENT=record.cu_seqlens is None and tokens >= record.weight.shape[1] - 1,
        USES_FAST_MATH=fast,
        LOAD_CHANNEL_PAIRS=load_channel_pairs and fast and record.x.dtype == jnp.bfloat16 and channels % 2 == 0,
    )
