"""The states of a causal convolution as callers keep them: in slots, and with W tokens where kernels need W - 1."""

from typing import Any

import jax
import jax.numpy as jnp


def before(args: Any) -> jax.Array | None:
    """Returns the tokens before the first ones, [B, I, W - 1], or [N, I, W - 1] of packed sequences; None for zeros."""
    state = _stored(args)
    return None if state is None else state[..., state.shape[2] - (args.weight.shape[1] - 1) :]


def after(args: Any, final: jax.Array) -> jax.Array:
    """Returns the states of a call as its initial states are kept.

    Args:
        args: The argument record of `causal_conv1d`.
        final: The last W - 1 tokens of every row or sequence, [B, I, W - 1] or [N, I, W - 1].
    """
    state = _stored(args)
    if state is None:
        return final
    if state.shape[2] == args.weight.shape[1]:
        final = jnp.concatenate([_oldest(args, state)[..., None].astype(final.dtype), final], axis=2)
    if args.state_indices is None:
        return final
    slots = args.initial_state
    stored = args.state_indices >= 0
    if args.cu_seqlens is not None:
        stored &= _lengths(args) > 0
    target = jnp.where(stored, args.state_indices, slots.shape[0])
    return slots.at[target].set(final.astype(slots.dtype), mode="drop")


def _stored(args: Any) -> jax.Array | None:
    """Returns the initial states of rows or sequences, out of their slots; zeros where an index is no slot."""
    slots, indices = args.initial_state, args.state_indices
    if slots is None or indices is None:
        return slots
    return slots.at[jnp.where(indices < 0, slots.shape[0], indices)].get(mode="fill", fill_value=0)


def _oldest(args: Any, state: jax.Array) -> jax.Array:
    """Returns the W-th token from the end of every row or sequence, [B, I] or [N, I]; `state` has W tokens."""
    width, tokens = state.shape[2], args.x.shape[1]
    if args.cu_seqlens is None:
        return args.x[:, tokens - width] if tokens >= width else state[:, :, tokens]
    lengths = _lengths(args)
    end = jnp.clip(args.cu_seqlens[1:], 0, tokens)
    inside = args.x[0].at[jnp.where(lengths >= width, end - width, 0)].get(mode="clip")
    carried = jnp.take_along_axis(state, jnp.clip(lengths, 0, width - 1)[:, None, None], axis=2)[..., 0]
    return jnp.where((lengths >= width)[:, None], inside, carried.astype(inside.dtype))


def _lengths(args: Any) -> jax.Array:
    return jnp.diff(jnp.clip(args.cu_seqlens, 0, args.x.shape[1]))
