"""Both passes of the causal convolution in Triton."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.families.causal_convolution import CausalConvolution, places, states
from ejkernel.families.causal_convolution.final_states import add_state_gradients, final_states
from ejkernel.ops.device import current_device
from ejkernel.types.pullback import Pullback
from ejkernel_triton.causal_convolution.config import ConvolutionBackward, ConvolutionForward
from ejkernel_triton.launch import Shape, interpreting, launch


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
        BLOCKS=-(-tokens // (block_t * steps)),
        TILES=-(-channels // block_c),
        BIAS=record.bias is not None,
        STATE=record.initial_state is not None,
        PACKED=record.cu_seqlens is not None,
        SILU=record.activation == "silu",
        FINAL=record.cu_seqlens is None and tokens >= record.weight.shape[1] - 1,
        FAST=fast,
        PAIRS=pairs and fast and record.x.dtype == jnp.bfloat16 and channels % 2 == 0,
    )


def forward(record: CausalConvolution, config: ConvolutionForward) -> tuple[tuple[jax.Array, jax.Array], tuple[()]]:
    """Output and final states of a record.

    Args:
        record: The canonical arguments.
        config: Tiles and warps.

    Returns:
        Output [B, T, C] and final states, both in x's dtype. There are no residuals.
    """
    from ejkernel_triton.causal_convolution.convolution_kernels import forward_kernel

    spec, rows = make_spec(record, config.block_t, config.block_c, 1), record.x.shape[0]
    (output,) = launch(
        forward_kernel,
        _inputs(record),
        (Shape(record.x.shape, record.x.dtype),),
        batch=rows,
        grid=rows * spec.BLOCKS * spec.TILES,
        num_warps=config.num_warps,
        num_stages=1,
        constants={"spec": spec},
    )
    return (output, final_states(record)), ()


def backward(pullback: Pullback, config: ConvolutionBackward) -> dict[str, jax.Array]:
    """Gradients of the wanted fields of a record.

    Args:
        pullback: Record, cotangents of output and final states, and the wanted names.
        config: Tiles, blocks and warps.

    Returns:
        Each wanted gradient, in its field's shape and dtype.
    """
    from ejkernel_triton.causal_convolution.convolution_kernels import backward_kernel

    record: CausalConvolution = pullback.record
    outputs, final = pullback.cotangent
    spec = make_spec(record, config.block_t, config.block_c, config.blocks, stages=config.num_stages, pairs=True)
    rows = record.x.shape[0]
    float32, state_tokens = jnp.float32, spec.W - 1
    dx, dweights, dbefore = launch(
        backward_kernel,
        (*_inputs(record), outputs, jnp.swapaxes(final, 1, 2) if spec.FINAL else None),
        (
            Shape(record.x.shape, record.x.dtype),
            Shape((rows, spec.BLOCKS, spec.W + 1, spec.C), float32),
            Shape((rows, state_tokens, spec.C), float32),
        ),
        batch=rows,
        grid=rows * spec.BLOCKS * spec.TILES,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        constants={"spec": spec},
    )
    before = jnp.swapaxes(dbefore, 1, 2) if spec.STATE else jnp.zeros(states(record).shape, float32)
    if not spec.FINAL:
        dx, before = add_state_gradients(record, dx, before, final)
    # One sum of the weights' and the bias's parts, over rows and programs.
    dweight = dweights.sum(axis=(0, 1))
    found: dict[str, Any] = {"x": dx, "weight": dweight[:-1].T, "bias": dweight[-1], "initial_state": before}
    return {name: found[name].astype(getattr(record, name).dtype) for name in sorted(pullback.wanted)}


def _inputs(record: CausalConvolution) -> tuple[jax.Array | None, ...]:
    """x, W^T and bias in float32, the state's tokens as rows, and the first token of every token's sequence."""
    before = None if record.initial_state is None else jnp.swapaxes(states(record), 1, 2)
    bias = None if record.bias is None else record.bias.astype(jnp.float32)[None]
    starts = None
    if record.cu_seqlens is not None:
        sequence, position = places(record)
        tokens = record.x.shape[1]
        starts = jnp.where(sequence >= 0, jnp.arange(tokens, dtype=jnp.int32) - position, tokens)
    return record.x, record.weight.T.astype(jnp.float32)[None], bias, before, starts
