"""The states of a causal convolution as callers keep them: in slots, and with W tokens where kernels need W - 1."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ejkernel.planning.trees import path_windows, token_trees


def kernels_update_slots(args: Any) -> bool:
    """Returns whether implementations read and store the states in slots: those of packed sequences, of W - 1 tokens.

    The states of rows, and those of W tokens, are read before a kernel and stored after it.
    """
    return (
        args.cu_seqlens is not None
        and args.state_indices is not None
        and args.parents is None
        and args.initial_state.shape[2] == args.weight.shape[1] - 1
    )


def tokens_before_first(args: Any) -> jax.Array | None:
    """Returns the tokens before the first ones, [B, I, W - 1], or [N, I, W - 1] of packed sequences; None for zeros."""
    state = _initial_states(args)
    return None if state is None else state[..., state.shape[2] - (args.weight.shape[1] - 1) :]


def updated_states(args: Any, last_tokens: jax.Array) -> jax.Array:
    """Returns the states of a call as its initial states are kept.

    Args:
        args: The argument record of `causal_conv1d`.
        last_tokens: The last W - 1 tokens of every row or sequence, [B, I, W - 1] or [N, I, W - 1]; the updated slots
            where `kernels_update_slots`.
    """
    if kernels_update_slots(args):
        return last_tokens
    state = _initial_states(args)
    if state is None:
        return last_tokens
    if state.shape[2] == args.weight.shape[1]:
        last_tokens = jnp.concatenate(
            [_oldest_state_token(args, state)[..., None].astype(last_tokens.dtype), last_tokens], axis=2
        )
    if args.state_indices is None:
        return last_tokens
    slots = args.initial_state
    stored = args.state_indices >= 0
    if args.cu_seqlens is not None:
        stored &= _packed_lengths(args) > 0
    target = jnp.where(stored, args.state_indices, slots.shape[0])
    return slots.at[target].set(last_tokens.astype(slots.dtype), mode="drop")


class TreeWindows(NamedTuple):
    """The tokens along each token's path in a tree of draft tokens.

    Attributes:
        x: [B * T, I], all tokens; 0 for padding tokens.
        preceding_tokens: [B * T, I, S], the tokens before each, the oldest first, as many as a state has.
        is_request_token: [B * T] bool, tokens of a request.
    """

    x: jax.Array
    preceding_tokens: jax.Array
    is_request_token: jax.Array


def tree_windows(args: Any) -> TreeWindows:
    """Returns the windows of a call with `parents`."""
    trees, state = token_trees(args.parents, args.cu_seqlens), _initial_states(args)
    real = trees.requests >= 0
    # Padding may hold NaN, and so may the slot that is read for it; neither outputs nor gradients may get that.
    x = jnp.where(real[:, None], args.x.reshape(-1, args.x.shape[2]), 0)
    if state is None:
        state = jnp.zeros((trees.starts.shape[0], x.shape[1], args.weight.shape[1] - 1), x.dtype)
    preceding_tokens = jnp.where(real[:, None, None], path_windows(x, state, trees), 0)
    return TreeWindows(x, preceding_tokens, real)


def states_after_tree_tokens(args: Any) -> jax.Array:
    """Returns the states after every token of a call with `parents`, [B, T, I, S], in x's dtype."""
    x, preceding_tokens, real = tree_windows(args)
    states = jnp.concatenate([preceding_tokens[..., 1:], x[..., None]], axis=2)
    return jnp.where(real[:, None, None], states, 0).reshape(*args.x.shape, -1)


def _initial_states(args: Any) -> jax.Array | None:
    """Returns the initial states of rows or sequences, out of their slots; zeros where an index is no slot."""
    slots, indices = args.initial_state, args.state_indices
    if slots is None or indices is None:
        return slots
    return slots.at[jnp.where(indices < 0, slots.shape[0], indices)].get(mode="fill", fill_value=0)


def _oldest_state_token(args: Any, state: jax.Array) -> jax.Array:
    """Returns the W-th token from the end of every row or sequence, [B, I] or [N, I]; `state` has W tokens."""
    width, tokens = state.shape[2], args.x.shape[1]
    if args.cu_seqlens is None:
        return args.x[:, tokens - width] if tokens >= width else state[:, :, tokens]
    lengths = _packed_lengths(args)
    end = jnp.clip(args.cu_seqlens[1:], 0, tokens)
    inside = args.x[0].at[jnp.where(lengths >= width, end - width, 0)].get(mode="clip")
    carried = jnp.take_along_axis(state, jnp.clip(lengths, 0, width - 1)[:, None, None], axis=2)[..., 0]
    return jnp.where((lengths >= width)[:, None], inside, carried.astype(inside.dtype))


def _packed_lengths(args: Any) -> jax.Array:
    return jnp.diff(jnp.clip(args.cu_seqlens, 0, args.x.shape[1]))
