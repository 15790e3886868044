"""Defines the argument record of the selective scan, and functions of the record alone."""

from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.families.selective_scan import packed_scan
from ejkernel.types.arguments import arguments

TOKENS_PER_STORED_STATE = packed_scan.TOKENS_PER_INTERVAL
"""Tokens between the states that a forward pass leaves for the backward pass."""


@arguments
class SelectiveScan:
    """Canonical input of one scan. B rows, T tokens, I channels, E numbers per state, N packed sequences, S slots.

    Attributes:
        x: [B, T, I] floating.
        step: [B, T, I] floating, dt: how far the state moves at each token.
        decay: [I, E] floating, A: negative, or the state grows.
        write: [B, T, E] floating, B.
        read: [B, T, E] floating, C.
        skip: [I] floating, D.
        initial_state: [B, I, E] floating, the state before the first token; None is zeros. [N, I, E] of packed
            sequences; with `state_slots` the slots [S, I, E] that hold them.
        cu_seqlens: [N + 1] int, with B = 1: sequence n owns tokens `cu_seqlens[n] : cu_seqlens[n + 1]`, and each has a
            state of its own. Padding tokens have output 0.
        state_slots: [N] int, the slot in which each packed sequence has its state; those of sequences with tokens
            differ. Outside of 0 to S - 1: the sequence starts from zeros, and its state is not kept. The final states
            are then the slots, in their dtype, of which only those of sequences with tokens have changed.
    """

    x: jax.Array
    step: jax.Array
    decay: jax.Array
    write: jax.Array
    read: jax.Array
    skip: jax.Array
    initial_state: jax.Array | None = None
    cu_seqlens: jax.Array | None = None
    state_slots: jax.Array | None = None


@arguments
class ScanResiduals:
    """The residuals of a forward pass.

    Attributes:
        states: [B, ceil(T / INTERVAL), E, I] in the accumulator's dtype, the states before tokens 0, INTERVAL, ...; of
            packed sequences [1, J, E, I], the states before their intervals as
            `ejkernel.families.selective_scan.packed_scan` counts them, 0 for those that no sequence has.
    """

    states: jax.Array


def accumulator(record: SelectiveScan) -> Any:
    """Returns the dtype of states and sums: float32, or float64 for float64 x."""
    return jnp.promote_types(record.x.dtype, jnp.float32)


def first_state(record: SelectiveScan) -> jax.Array:
    """Returns the states before the first token, [B, E, I], or [N, E, I] of packed sequences that are not in slots."""
    (rows, _, channels), size = record.x.shape, record.decay.shape[1]
    rows = rows if record.cu_seqlens is None else record.cu_seqlens.shape[0] - 1
    if record.initial_state is None:
        return jnp.zeros((rows, size, channels), accumulator(record))
    return jnp.swapaxes(record.initial_state, 1, 2).astype(accumulator(record))
