"""Forward pass of the causal convolution in Triton."""

import jax
import jax.numpy as jnp

from ejkernel.families.causal_convolution import CausalConvolution, states, token_sequences_and_positions
from ejkernel.families.causal_convolution.final_states import final_states
from ejkernel_triton.causal_convolution.config import ConvolutionForward
from ejkernel_triton.causal_convolution.spec import make_spec
from ejkernel_triton.launch import ShapeDtype, launch


def forward(record: CausalConvolution, config: ConvolutionForward) -> tuple[tuple[jax.Array, jax.Array], tuple[()]]:
    """Returns output and final states of a record.

    Args:
        record: The canonical arguments.
        config: Tiles and warps.

    Returns:
        Output [B, T, C] and final states, both in x's dtype. There are no residuals.
    """
    from ejkernel_triton.causal_convolution.kernels.causal_conv_fwd import causal_conv_fwd_kernel

    spec, rows = make_spec(record, config.block_t, config.block_c, 1), record.x.shape[0]
    (output,) = launch(
        causal_conv_fwd_kernel,
        kernel_inputs(record),
        (ShapeDtype(record.x.shape, record.x.dtype),),
        batch=rows,
        grid=rows * spec.NUM_TOKEN_PROGRAMS * spec.NUM_CHANNEL_TILES,
        num_warps=config.num_warps,
        num_stages=1,
        constants={"spec": spec},
    )
    return (output, final_states(record)), ()


def kernel_inputs(record: CausalConvolution) -> tuple[jax.Array | None, ...]:
    """Returns x, W^T and bias in float32, the state's tokens as rows, and the first token of every token's sequence."""
    initial_tokens = None if record.initial_state is None else jnp.swapaxes(states(record), 1, 2)
    bias = None if record.bias is None else record.bias.astype(jnp.float32)[None]
    sequence_starts = None
    if record.cu_seqlens is not None:
        sequence, position = token_sequences_and_positions(record)
        tokens = record.x.shape[1]
        sequence_starts = jnp.where(sequence >= 0, jnp.arange(tokens, dtype=jnp.int32) - position, tokens)
    return record.x, record.weight.T.astype(jnp.float32)[None], bias, initial_tokens, sequence_starts
