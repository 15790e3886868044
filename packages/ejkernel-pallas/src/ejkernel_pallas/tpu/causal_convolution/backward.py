"""Backward pass of the causal convolution on TPUs."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu

from ejkernel.families.causal_convolution import CausalConvolution, reference, states
from ejkernel.families.causal_convolution.final_states import add_state_gradients
from ejkernel.families.causal_convolution.slot_states import backward_with_slot_states
from ejkernel.types.pullback import Pullback
from ejkernel_pallas.tpu.causal_convolution import plan
from ejkernel_pallas.tpu.causal_convolution.config import TOKENS_PER_REGISTER, TpuConvolution
from ejkernel_pallas.tpu.causal_convolution.forward import block_operand, run
from ejkernel_pallas.tpu.causal_convolution.kernels.causal_conv_bwd import causal_conv_bwd
from ejkernel_pallas.tpu.causal_convolution.kernels.tile import HALO_TOKENS
from ejkernel_pallas.tpu.causal_convolution.spec import ConvolutionSpec, make_spec
from ejkernel_pallas.tpu.mosaic.launch import Operand
from ejkernel_pallas.tpu.mosaic.vectors import LANES

Gradients = dict[str, jax.Array]


@backward_with_slot_states
def backward(pullback: Pullback, config: TpuConvolution) -> Gradients:
    """Returns the gradients of the requested fields of a record.

    Args:
        pullback: Record, cotangents of output and final states, and the requested names.
        config: Blocks.

    Returns:
        Each requested gradient, in its field's shape and dtype.
    """
    record: CausalConvolution = pullback.record
    spec = make_spec(record, config)
    outputs, final = pullback.cotangent
    dx, dweights = _input_and_weight_gradients(record, spec, outputs)
    found: Gradients = {"weight": dweights[:-1][::-1].T, "bias": dweights[-1]}
    before = jnp.zeros(states(record).shape, jnp.float32)
    if spec.computes_first_tokens_separately:
        first = plan.find_first_tokens(record)
        first_gradients = _gradients_from_first_tokens(first, spec, outputs)
        dx = plan.add_to_first_tokens(first, spec.is_packed, dx, first_gradients["x"].astype(dx.dtype))
        before = first_gradients["initial_state"]
        found = {
            name: found[name] + first_gradients[name] if name in first_gradients else found[name] for name in found
        }
    dx, before = add_state_gradients(record, dx, before, final)
    found |= {"x": dx, "initial_state": before, "sequence_state": before}
    return {name: found[name].astype(getattr(record, name).dtype) for name in sorted(pullback.grad_fields)}


def _input_and_weight_gradients(
    record: CausalConvolution, spec: ConvolutionSpec, output_cotangent: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Returns dx [B, T, C], and the gradients of the weights and the bias, float32 [W + 1, C]."""
    rows, _, channels = record.x.shape

    def previous_tokens_index(*grid_indices: Any) -> tuple[Any, ...]:
        block = (spec.blocks_per_row - 1 - grid_indices[2]) * (spec.block_t // TOKENS_PER_REGISTER) - 1
        return grid_indices[0], jnp.maximum(block, 0), grid_indices[1]

    sums = 8 * (spec.filter_width + 1)
    results = run(
        "causal_conv_bwd",
        causal_conv_bwd,
        record,
        spec,
        inputs={
            "x_before_block": Operand(record.x, (None, TOKENS_PER_REGISTER, spec.block_c), previous_tokens_index),
            "cotangent": block_operand(spec, output_cotangent.astype(record.x.dtype), reverses_token_blocks=True),
        },
        outputs={
            "dx": block_operand(spec, jax.ShapeDtypeStruct(record.x.shape, record.x.dtype), reverses_token_blocks=True),
            "dweights": Operand(
                jax.ShapeDtypeStruct((rows, sums, channels), jnp.float32),
                (None, sums, spec.block_c),
                lambda *step: (step[0], 0, step[1]),
            ),
        },
        scratch={
            "convolution_sum_cotangents": pltpu.VMEM(
                (spec.block_c // LANES, spec.block_t + HALO_TOKENS, LANES), jnp.float32
            )
        },
    )
    dweights = results["dweights"].reshape(rows, spec.filter_width + 1, 8, channels).sum(axis=(0, 2))
    return results["dx"], dweights * 0.5 if spec.halves_convolution_sums else dweights


def _gradients_from_first_tokens(
    first_tokens: plan.FirstTokens, spec: ConvolutionSpec, output_cotangent: jax.Array
) -> Gradients:
    """Returns the gradients that come from the outputs of the first tokens, in float32."""
    record = first_tokens.first_tokens_record
    names = [name for name in ("x", "weight", "bias", "initial_state") if getattr(record, name) is not None]
    wide = {name: getattr(record, name).astype(jnp.float32) for name in names}
    if spec.is_packed:
        cotangent = jnp.take(output_cotangent[0], first_tokens.token_index, axis=0, mode="fill", fill_value=0)
    else:
        cotangent = output_cotangent[:, : record.x.shape[1]]

    def first_token_outputs(record_fields: Gradients) -> jax.Array:
        return reference(CausalConvolution(**record_fields, activation=record.activation))[0][0]

    return jax.vjp(first_token_outputs, wide)[1](cotangent.astype(jnp.float32))[0]
