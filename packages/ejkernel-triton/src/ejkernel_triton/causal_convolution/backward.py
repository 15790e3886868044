"""Backward pass of the causal convolution in Triton."""

from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.families.causal_convolution import CausalConvolution, states
from ejkernel.families.causal_convolution.final_states import add_state_gradients
from ejkernel.types.pullback import Pullback
from ejkernel_triton.causal_convolution.config import ConvolutionBackward
from ejkernel_triton.causal_convolution.forward import kernel_inputs
from ejkernel_triton.causal_convolution.spec import ConvolutionSpec, make_spec
from ejkernel_triton.launch import ShapeDtype, launch


def backward(pullback: Pullback, config: ConvolutionBackward) -> dict[str, jax.Array]:
    """Returns the gradients of the requested fields of a record.

    Args:
        pullback: Record, cotangents of output and final states, and the names of the requested fields.
        config: Tiles, blocks and warps.

    Returns:
        The gradient of each requested field, in its shape and dtype.
    """
    record: CausalConvolution = pullback.record
    final_cotangent = pullback.cotangent[1]
    spec = make_spec(
        record,
        config.block_t,
        config.block_c,
        config.blocks_per_program,
        num_stages=config.num_stages,
        load_channel_pairs=True,
    )
    dx, weight_gradients, dinitial_tokens = _launch(pullback, config, spec)
    initial_tokens = (
        jnp.swapaxes(dinitial_tokens, 1, 2) if spec.HAS_INITIAL_STATE else jnp.zeros(states(record).shape, jnp.float32)
    )
    if not spec.ADD_FINAL_COTANGENT:
        dx, initial_tokens = add_state_gradients(record, dx, initial_tokens, final_cotangent)
    # XLA adds up the partial sums of the gradients of weights and bias, over batch rows and programs.
    dweight = weight_gradients.sum(axis=(0, 1))
    gradients: dict[str, Any] = {
        "x": dx,
        "weight": dweight[:-1].T,
        "bias": dweight[-1],
        "initial_state": initial_tokens,
    }
    return {name: gradients[name].astype(getattr(record, name).dtype) for name in sorted(pullback.grad_fields)}


def _launch(pullback: Pullback, config: ConvolutionBackward, spec: ConvolutionSpec) -> tuple[jax.Array, ...]:
    """Returns the gradients of x, of the weights and bias per program, and of the initial tokens."""
    from ejkernel_triton.causal_convolution.kernels.causal_conv_bwd import causal_conv_bwd_kernel

    record: CausalConvolution = pullback.record
    output_cotangent, final_cotangent = pullback.cotangent
    num_rows = record.x.shape[0]
    return launch(
        causal_conv_bwd_kernel,
        (
            *kernel_inputs(record),
            output_cotangent,
            jnp.swapaxes(final_cotangent, 1, 2) if spec.ADD_FINAL_COTANGENT else None,
        ),
        (
            ShapeDtype(record.x.shape, record.x.dtype),
            ShapeDtype((num_rows, spec.NUM_TOKEN_PROGRAMS, spec.W + 1, spec.C), jnp.float32),
            ShapeDtype((num_rows, spec.W - 1, spec.C), jnp.float32),
        ),
        batch=num_rows,
        grid=num_rows * spec.NUM_TOKEN_PROGRAMS * spec.NUM_CHANNEL_TILES,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        constants={"spec": spec},
    )
