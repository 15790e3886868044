"""Computes the final states of the causal convolution and their contribution to gradients, for all implementations."""

import jax
import jax.numpy as jnp

from ejkernel.arithmetic import is_symbolic
from ejkernel.families.causal_convolution.record import CausalConvolution, states

States = jax.Array


def final_states(record: CausalConvolution) -> States:
    """Returns the last W - 1 tokens of every sequence, [B, C, W - 1] or [N, C, W - 1], in x's dtype."""
    before, num_state_tokens = states(record), record.weight.shape[1] - 1
    tokens = record.x.shape[1]
    if record.cu_seqlens is None and is_symbolic(tokens):
        longer = jnp.pad(jnp.swapaxes(record.x, 1, 2), ((0, 0), (0, 0), (num_state_tokens, 0)))
        last = longer[:, :, tokens:]
        index = jnp.arange(num_state_tokens, dtype=jnp.int32) + jnp.int32(tokens)
        carried = before.at[:, :, index].get(mode="fill", fill_value=0)
        return jnp.where(index < num_state_tokens, carried, last)
    if record.cu_seqlens is None:
        last = jnp.swapaxes(record.x[:, max(0, tokens - num_state_tokens) :], 1, 2)
        return jnp.concatenate([before, last], axis=2)[:, :, before.shape[2] + last.shape[2] - num_state_tokens :]
    token, slot, inside = _packed_final_state_sources(record)
    rows = record.x[0].at[token].get(mode="clip")
    carried = jnp.take_along_axis(before, jnp.clip(slot, 0, max(0, num_state_tokens - 1))[:, None], axis=2)
    return jnp.where(inside[:, None], jnp.swapaxes(rows, 1, 2), carried)


def add_state_gradients(
    record: CausalConvolution, dx: jax.Array, dinitial_states: States, cotangent: States
) -> tuple[jax.Array, States]:
    """Adds the final states' cotangents to the gradients of what they hold.

    Args:
        record: The canonical arguments.
        dx: [B, T, C], gradient of x by way of the output.
        dinitial_states: [B, C, W - 1] or [N, C, W - 1], gradient of the states before, as above.
        cotangent: Cotangent of the final states, same shape.

    Returns:
        Both, in their dtypes.
    """
    num_state_tokens, tokens = record.weight.shape[1] - 1, record.x.shape[1]
    if num_state_tokens == 0:
        return dx, dinitial_states
    if record.cu_seqlens is None and is_symbolic(tokens):
        index = jnp.arange(num_state_tokens, dtype=jnp.int32) + jnp.int32(tokens)
        is_carried = index < num_state_tokens
        rows = jnp.swapaxes(jnp.where(is_carried, 0, cotangent), 1, 2).astype(dx.dtype)
        dx += jnp.pad(rows, ((0, 0), (tokens, 0), (0, 0)))[:, num_state_tokens:]
        carried = jnp.where(is_carried, cotangent, 0).astype(dinitial_states.dtype)
        return dx, dinitial_states.at[:, :, index].add(carried, mode="drop")
    if record.cu_seqlens is None:
        num_last = min(num_state_tokens, tokens)
        last = jnp.swapaxes(cotangent[:, :, num_state_tokens - num_last :], 1, 2).astype(dx.dtype)
        carried = cotangent[:, :, : num_state_tokens - num_last].astype(dinitial_states.dtype)
        return dx.at[:, tokens - num_last :].add(last), dinitial_states.at[:, :, num_last:].add(carried)
    token, slot, inside = _packed_final_state_sources(record)
    rows = jnp.swapaxes(cotangent, 1, 2).astype(dx.dtype)
    dx = dx.at[0, jnp.where(inside, token, tokens)].add(rows, mode="drop")
    carried = jnp.where(inside[:, None], 0, cotangent).astype(dinitial_states.dtype)
    sequence = jnp.arange(slot.shape[0])[:, None]
    columns = jnp.where(inside, num_state_tokens, slot)
    return dx, dinitial_states.at[sequence, :, columns].add(jnp.swapaxes(carried, 1, 2), mode="drop")


def output_contributions_of_states(record: CausalConvolution) -> tuple[jax.Array, jax.Array]:
    """Returns what the states before packed sequences add to the sums of their first W - 1 tokens.

    Returns:
        Tokens [N, W - 1] int32, T for those that a shorter sequence does not have, and [N, W - 1, C] in the
        accumulator's dtype.
    """
    dtype = jnp.promote_types(record.x.dtype, jnp.float32)
    before, width = states(record).astype(dtype), record.weight.shape[1]
    weight, tokens = record.weight.astype(dtype), record.x.shape[1]
    rows = [
        sum(weight[:, width - 1 - k] * before[:, :, width - 1 + position - k] for k in range(position + 1, width))
        for position in range(width - 1)
    ]
    bounds = jnp.clip(record.cu_seqlens.astype(jnp.int32), 0, tokens)  # pyright: ignore[reportOptionalMemberAccess]
    token = bounds[:-1, None] + jnp.arange(width - 1, dtype=jnp.int32)
    return jnp.where(token < bounds[1:, None], token, tokens), jnp.stack([jnp.asarray(row) for row in rows], axis=1)


def _packed_final_state_sources(record: CausalConvolution) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns what every slot of the final states holds, [N, W - 1]: a token, or a slot of the states before; and
    which.
    """
    if record.cu_seqlens is None:
        raise ValueError("cu_seqlens: got None, wants the bounds of packed sequences")
    num_state_tokens, tokens = record.weight.shape[1] - 1, record.x.shape[1]
    bounds = jnp.clip(record.cu_seqlens.astype(jnp.int32), 0, tokens)
    slot = jnp.arange(num_state_tokens, dtype=jnp.int32)
    joint_index = slot + jnp.diff(bounds)[:, None]
    return bounds[1:, None] - num_state_tokens + slot, joint_index, joint_index >= num_state_tokens
