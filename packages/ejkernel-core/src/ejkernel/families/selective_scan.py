"""The selective scan family: the record its operations lower to, its meaning and its residuals.

Every channel i of every row carries a state h of E numbers. For each token t, in order:

    h_t = exp(dt_ti * A_i) * h_{t-1} + dt_ti * x_ti * B_t       zero-order hold on A, Euler on B
    y_ti = <h_t, C_t> + D_i * x_ti                              read after write

States and sums are in float32 (float64 for float64 x).

Source: Gu & Dao 2023, arXiv:2312.00752 (Mamba).
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ejkernel.ops.arguments import arguments
from ejkernel.ops.model import Family
from ejkernel.planning import packed_scan

INTERVAL = 64
"""Tokens between the states that a forward pass leaves for the backward pass."""


@arguments
class SelectiveScan:
    """Canonical input of one scan. B rows, T tokens, I channels, E numbers a state, N packed sequences, S slots.

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
            state of its own. Tokens of none have output 0.
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
    """What a forward pass leaves for the backward pass.

    Attributes:
        states: [B, ceil(T / INTERVAL), E, I] in the accumulator's dtype, the states before tokens 0, INTERVAL, ...; of
            packed sequences those of the row that `ejkernel.planning.packed_scan` makes of them.
    """

    states: jax.Array


def accumulator(record: SelectiveScan) -> Any:
    """The dtype of states and sums: float32, or float64 for float64 x."""
    return jnp.promote_types(record.x.dtype, jnp.float32)


def first_state(record: SelectiveScan) -> jax.Array:
    """The states before the first token, [B, E, I]."""
    (rows, _, channels), size = record.x.shape, record.decay.shape[1]
    if record.initial_state is None:
        return jnp.zeros((rows, size, channels), accumulator(record))
    return jnp.swapaxes(record.initial_state, 1, 2).astype(accumulator(record))


def reference(record: SelectiveScan) -> tuple[tuple[jax.Array, jax.Array], ScanResiduals]:
    """The family's meaning, one token at a time; float64 if x is, else float32.

    Returns:
        Output [B, T, I] in x's dtype, final states [B, I, E] in the accumulator's, and the residuals. Of packed
        sequences, final states are [N, I, E], or the slots.
    """
    if record.cu_seqlens is not None:
        (output, _), residuals = reference(packed_scan.as_row(record))
        return packed_scan.from_row(record, output), residuals
    dtype = accumulator(record)
    decay, skip = record.decay.T.astype(dtype), record.skip.astype(dtype)
    fields = (record.x, record.step, record.write, record.read)
    tokens = tuple(jnp.moveaxis(field, 1, 0).astype(dtype) for field in fields)

    def token(state: jax.Array, parts: tuple[jax.Array, ...]) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        x, step, write, read = parts
        after = jnp.exp(step[:, None] * decay) * state + write[..., None] * (step * x)[:, None]
        output = jnp.einsum("bei,be->bi", after, read, precision=lax.Precision.HIGHEST) + skip * x
        return after, (output, state)

    final, (outputs, states) = lax.scan(token, first_state(record), tokens)
    residuals = ScanResiduals(states=jnp.moveaxis(states[::INTERVAL], 0, 1))
    return (jnp.moveaxis(outputs, 0, 1).astype(record.x.dtype), jnp.swapaxes(final, 1, 2)), residuals


def localise(record: SelectiveScan, offsets: Mapping[str, jax.Array]) -> SelectiveScan:
    """One shard's record as it is: rows and channels know nothing of each other."""
    return record


def axes(record: SelectiveScan) -> dict[str, Any]:
    """Axis letters of a record's fields and of its outputs."""
    row = "b" if record.cu_seqlens is None else "n"
    return {
        "x": "b t i",
        "step": "b t i",
        "decay": "i e",
        "write": "b t e",
        "read": "b t e",
        "skip": "i",
        "initial_state": f"{row} i e",
        "cu_seqlens": "n",
        "state_slots": "n",
        # Final states of packed sequences have b = N there: a packed call has one row, which cannot be split.
        "output": ("b t i", "b i e"),
    }


FAMILY = Family(
    name="selective_scan",
    record=SelectiveScan,
    differentiable=("x", "step", "decay", "write", "read", "skip", "initial_state"),
    dtype=lambda record: record.x.dtype,
    head_dims=lambda record: (record.decay.shape[1],),
    axes=axes,
    shardable="bi",
    aligned=(),
    localise=localise,
    reference=reference,
)
