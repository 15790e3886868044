"""Defines the argument record of the causal convolution, and functions of the record alone."""

from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.planning import packing
from ejkernel.types.arguments import arguments, static


@arguments
class CausalConvolution:
    """Canonical input of one convolution. B rows, T tokens, C channels, W weights a channel, N packed sequences.

    Attributes:
        x: [B, T, C] floating.
        weight: [C, W] floating.
        bias: [C] floating; None adds nothing.
        initial_state: [B, C, W - 1] floating, the tokens before the first of every row; None is zeros.
        cu_seqlens: [N + 1] int, with B = 1: sequence n owns tokens `cu_seqlens[n] : cu_seqlens[n + 1]`, and sees no
            others.
        sequence_state: [N, C, W - 1] floating, with `cu_seqlens`: the tokens before the first of every sequence; with
            `state_slots` the slots [S, C, W - 1] that hold them.
        state_slots: [N] int, the slot in which each packed sequence has its state; those of sequences with tokens
            are different. A sequence whose index is no slot, such as -1, starts from zeros and stores nothing. The
            final states are then all slots, in their dtype.
        activation: None, or `"silu"`.
    """

    x: jax.Array
    weight: jax.Array
    bias: jax.Array | None = None
    initial_state: jax.Array | None = None
    cu_seqlens: jax.Array | None = None
    sequence_state: jax.Array | None = None
    state_slots: jax.Array | None = None
    activation: str | None = static(None)


def accumulator(record: CausalConvolution) -> Any:
    """Returns the dtype of sums: float32, or float64 for float64 x."""
    return jnp.promote_types(record.x.dtype, jnp.float32)


def states(record: CausalConvolution) -> jax.Array:
    """Returns the tokens before the first ones, [B, C, W - 1], or [N, C, W - 1] of packed sequences, in x's dtype.

    States in slots have to be read out of them before (`slot_states.with_plain_states`).
    """
    state = record.initial_state if record.cu_seqlens is None else record.sequence_state
    if state is not None:
        return state.astype(record.x.dtype)
    rows = record.x.shape[0] if record.cu_seqlens is None else record.cu_seqlens.shape[0] - 1
    return jnp.zeros((rows, record.x.shape[2], record.weight.shape[1] - 1), record.x.dtype)


def token_sequences_and_positions(record: CausalConvolution) -> tuple[jax.Array, jax.Array]:
    """Returns the sequence (a row is one; -1 for none) of every token and its position in it, int32 [B, T]."""
    rows, tokens, _ = record.x.shape
    if record.cu_seqlens is not None:
        return packing.packed_ids(record.cu_seqlens, tokens)
    row, token = jnp.arange(rows, dtype=jnp.int32)[:, None], jnp.arange(tokens, dtype=jnp.int32)
    return jnp.broadcast_to(row, (rows, tokens)), jnp.broadcast_to(token, (rows, tokens))


def activate(record: CausalConvolution, p: jax.Array) -> jax.Array:
    """Returns the activation of sums."""
    return jax.nn.silu(p) if record.activation == "silu" else p
