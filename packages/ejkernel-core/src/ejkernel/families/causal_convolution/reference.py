"""Defines what the causal convolution computes, in plain jnp.

Every channel c is convolved along time with W weights of its own, the last of which meets the token itself:

    p_tc = bias_c + sum over k < W of weight_{c, W - 1 - k} * x_{t - k, c}        y = activation(p)

Tokens before the first of a sequence are those of its state, W - 1 tokens, the oldest first; zeros without one. The
state after a sequence is its last W - 1 tokens, those of the state before among them. Sums are in float32 (float64 for
float64 x). Padding tokens have output 0.

Source: the short convolution of H3 (Fu et al. 2022, arXiv:2212.14052) and of Mamba (Gu & Dao 2023, arXiv:2312.00752).
"""

import jax
import jax.numpy as jnp

from ejkernel.families.causal_convolution.record import (
    CausalConvolution,
    accumulator,
    activate,
    states,
    token_sequences_and_positions,
)
from ejkernel.families.causal_convolution.slot_states import with_plain_states, with_stored_states


def reference(record: CausalConvolution) -> tuple[tuple[jax.Array, jax.Array], tuple[()]]:
    """Computes the result of the family, with a gather of every token; in float64 if `x` is float64, else in
    float32.

    Returns:
        Output [B, T, C] and final states [B, C, W - 1], or [N, C, W - 1], both in x's dtype, or the slots. There are
        no residuals.
    """
    original, record = record, with_plain_states(record)
    dtype, width = accumulator(record), record.weight.shape[1]
    sequence, before = token_sequences_and_positions(record)[0], states(record)
    sums = jnp.zeros(record.x.shape, dtype)
    for k in range(width):
        sums = sums + record.weight[:, width - 1 - k].astype(dtype) * _delayed_tokens(record, before, k).astype(dtype)
    if record.bias is not None:
        sums = sums + record.bias.astype(dtype)
    output = jnp.where((sequence >= 0)[..., None], activate(record, sums), 0)
    return (output.astype(record.x.dtype), with_stored_states(original, _final_state(record, before))), ()


def _delayed_tokens(record: CausalConvolution, initial_states: jax.Array, k: int) -> jax.Array:
    """Returns, for every token, the token k positions before it, [B, T, C]."""
    (sequence, position), width = token_sequences_and_positions(record), record.weight.shape[1]
    shifted = jnp.pad(record.x, ((0, 0), (k, 0), (0, 0)))[:, : record.x.shape[1]]
    if width == 1 or k == 0:
        return shifted
    slot = jnp.clip(width - 1 + position - k, 0, width - 2)
    return jnp.where((position >= k)[..., None], shifted, initial_states[jnp.maximum(sequence, 0), :, slot])


def _final_state(record: CausalConvolution, before: jax.Array) -> jax.Array:
    """Returns the last W - 1 tokens of every sequence, [B, C, W - 1] or [N, C, W - 1]."""
    held, tokens = record.weight.shape[1] - 1, record.x.shape[1]
    if record.cu_seqlens is None:
        return jnp.concatenate([before, jnp.swapaxes(record.x, 1, 2)], axis=2)[:, :, tokens : tokens + held]
    slot, bounds = jnp.arange(held, dtype=jnp.int32), jnp.clip(record.cu_seqlens.astype(jnp.int32), 0, tokens)
    length = jnp.diff(bounds)[:, None]
    at = jnp.clip(bounds[1:, None] - held + slot, 0, tokens - 1)
    carried = jnp.take_along_axis(before, jnp.clip(slot + length, 0, max(0, held - 1))[:, None], axis=2)
    inside = (slot + length >= held)[:, None]
    return jnp.where(inside, jnp.swapaxes(record.x[0, at], 1, 2), carried)
