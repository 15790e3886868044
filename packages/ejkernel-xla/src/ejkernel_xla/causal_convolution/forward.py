"""The causal convolution in XLA: W shifted views of x, summed in one loop."""

from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.families.causal_convolution import (
    CausalConvolution,
    accumulator,
    activate,
    states,
    token_sequences_and_positions,
)
from ejkernel.families.causal_convolution.final_states import final_states, output_contributions_of_states


def forward(record: CausalConvolution, config: Any) -> tuple[tuple[jax.Array, jax.Array], tuple[()]]:
    """Returns output and final states of a record.

    Args:
        record: The canonical arguments.
        config: Not read.

    Returns:
        Output [B, T, C] and final states, both in x's dtype. There are no residuals.
    """
    return (activated_output(record), final_states(record)), ()


def activated_output(record: CausalConvolution) -> jax.Array:
    """Returns the activated sums, [B, T, C]."""
    dtype, width = accumulator(record), record.weight.shape[1]
    weight, tokens = record.weight.astype(dtype), record.x.shape[1]
    sequence, position = token_sequences_and_positions(record)
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
        token, rows = output_contributions_of_states(record)
        sums = sums.at[0, token].add(rows, mode="drop")
    if record.bias is not None:
        sums = sums + record.bias.astype(dtype)
    output = activate(record, sums).astype(record.x.dtype)
    return output if record.cu_seqlens is None else jnp.where((sequence >= 0)[..., None], output, 0)
