"""Both passes of the causal convolution in XLA: W shifted views of x, summed in one loop."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.families.causal_convolution import CausalConvolution, accumulator, activate, places, states
from ejkernel.families.causal_convolution.final_states import add_state_gradients, final_states, state_sums
from ejkernel.types.pullback import Pullback


def forward(record: CausalConvolution, config: Any) -> tuple[tuple[jax.Array, jax.Array], tuple[()]]:
    """Returns output and final states of a record.

    Args:
        record: The canonical arguments.
        config: Not read.

    Returns:
        Output [B, T, C] and final states, both in x's dtype. There are no residuals.
    """
    return (_output(record), final_states(record)), ()


def backward(pullback: Pullback, config: Any) -> dict[str, jax.Array]:
    """Returns gradients of the wanted fields of a record.

    Args:
        pullback: Record, cotangents of output and final states, and the wanted names.
        config: Not read.

    Returns:
        Each wanted gradient, in its field's shape and dtype.
    """
    record: CausalConvolution = pullback.record
    outputs, final = pullback.cotangent
    state = "initial_state" if record.cu_seqlens is None else "sequence_state"
    fields = {name: getattr(record, name) for name in ("x", "weight", "bias") if getattr(record, name) is not None}
    fields[state] = states(record)

    def output(fields: dict[str, jax.Array]) -> jax.Array:
        return _output(dataclasses.replace(record, **fields))

    # The transposed views: the same loop the other way. The sums, which the activation needs, are computed again.
    (found,) = jax.vjp(output, fields)[1](outputs)
    dx, dstate = add_state_gradients(record, found["x"], found[state], final)
    found |= {"x": dx, state: dstate}
    return {name: found[name].astype(getattr(record, name).dtype) for name in sorted(pullback.wanted)}


def _output(record: CausalConvolution) -> jax.Array:
    """Activated sums, [B, T, C]."""
    dtype, width = accumulator(record), record.weight.shape[1]
    weight, tokens = record.weight.astype(dtype), record.x.shape[1]
    sequence, position = places(record)
    if record.cu_seqlens is None:
        longer = jnp.concatenate([jnp.swapaxes(states(record), 1, 2), record.x], axis=1)
    else:
        # The gradient of a token of no sequence is 0, and its derivative must be none of NaN.
        real = jnp.where((sequence >= 0)[..., None], record.x, 0)
        longer = jnp.pad(real, ((0, 0), (width - 1, 0), (0, 0)))
    # W is small: XLA fuses the shifted views into one loop over x.
    sums = jnp.zeros(record.x.shape, dtype)
    for k in range(width):
        back = longer[:, width - 1 - k : width - 1 - k + tokens].astype(dtype)
        if record.cu_seqlens is not None:
            back = jnp.where((position >= k)[..., None], back, 0)
        sums = sums + weight[:, width - 1 - k] * back
    # States reach the first W - 1 tokens of each sequence: a few rows, added where they belong.
    if record.sequence_state is not None and width > 1:
        token, rows = state_sums(record)
        sums = sums.at[0, token].add(rows, mode="drop")
    if record.bias is not None:
        sums = sums + record.bias.astype(dtype)
    output = activate(record, sums).astype(record.x.dtype)
    return output if record.cu_seqlens is None else jnp.where((sequence >= 0)[..., None], output, 0)
