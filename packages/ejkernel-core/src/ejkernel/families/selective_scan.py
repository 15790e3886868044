"""The selective scan family: the record its operations lower to, its meaning and its residuals.

Every channel i of every row carries a state h of E numbers. For each token t, in order:

    h_t = exp(dt_ti * A_i) * h_{t-1} + dt_ti * x_ti * B_t       zero-order hold on A, Euler on B
    y_ti = <h_t, C_t> + D_i * x_ti                              read after write

States and sums are in float32 (float64 for float64 x).

Source: Gu & Dao 2023, arXiv:2312.00752 (Mamba).
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ejkernel.ops.arguments import arguments
from ejkernel.ops.model import Family
from ejkernel.planning import packed_scan, packing, slots
from ejkernel.planning.requests import packed_requests

INTERVAL = packed_scan.INTERVAL
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
            packed sequences [1, J, E, I], the states before their intervals as `ejkernel.planning.packed_scan` counts
            them, 0 for those that no sequence has.
    """

    states: jax.Array


def accumulator(record: SelectiveScan) -> Any:
    """The dtype of states and sums: float32, or float64 for float64 x."""
    return jnp.promote_types(record.x.dtype, jnp.float32)


def first_state(record: SelectiveScan) -> jax.Array:
    """The states before the first token, [B, E, I], or [N, E, I] of packed sequences that are not in slots."""
    (rows, _, channels), size = record.x.shape, record.decay.shape[1]
    rows = rows if record.cu_seqlens is None else record.cu_seqlens.shape[0] - 1
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
        return _packed_reference(record, record.cu_seqlens)
    _, outputs, before, final = _scan(record, first_state(record), None)
    residuals = ScanResiduals(states=jnp.moveaxis(before[::INTERVAL], 0, 1))
    return (jnp.moveaxis(outputs, 0, 1).astype(record.x.dtype), jnp.swapaxes(final, 1, 2)), residuals


def _packed_reference(
    record: SelectiveScan, cu_seqlens: jax.Array
) -> tuple[tuple[jax.Array, jax.Array], ScanResiduals]:
    """The meaning of packed sequences, each of which begins with its own state."""
    given, tokens = record, record.x.shape[1]
    if given.initial_state is not None and given.state_slots is not None:
        held = slots.read_slots(given.initial_state, given.state_slots, cu_seqlens)
        record = dataclasses.replace(record, initial_state=held, state_slots=None)
    ids, position = (x[0] for x in packing.packed_ids(cu_seqlens, tokens))
    first, real = first_state(record), (ids >= 0)[None, :, None]
    # Whatever tokens of no sequence hold, they have no part in anything.
    clean = {name: jnp.where(real, getattr(record, name), 0) for name in ("x", "step", "write", "read")}
    start = jnp.where((ids >= 0) & (position == 0), ids, -1)
    after, outputs, before, _ = _scan(dataclasses.replace(record, **clean), first, start)
    last = cu_seqlens[1:].astype(jnp.int32) - 1
    final = jnp.where((jnp.diff(cu_seqlens) > 0)[:, None, None], after[jnp.maximum(last, 0), 0], first)
    final = jnp.swapaxes(final, 1, 2)
    if given.initial_state is not None and given.state_slots is not None:
        final = slots.write_slots(given.initial_state, given.state_slots, cu_seqlens, final)
    at = packed_scan.packed_intervals(cu_seqlens, tokens)
    states = packed_scan.stored_states(cu_seqlens, before[jnp.clip(at.begin, 0, tokens - 1), 0][None])
    output = jnp.where(real, jnp.moveaxis(outputs, 0, 1), 0).astype(record.x.dtype)
    return (output, final), ScanResiduals(states=states)


def _scan(record: SelectiveScan, first: jax.Array, start: jax.Array | None) -> tuple[jax.Array, ...]:
    """The states after every token, outputs, and the states before every token, all token-major; and the final states.

    Args:
        record: The record.
        first: [B, E, I], the states before the first token; of packed sequences [N, E, I].
        start: [T], the sequence that begins at a token, -1 for none; None without packing.
    """
    dtype = accumulator(record)
    decay, skip = record.decay.T.astype(dtype), record.skip.astype(dtype)
    fields = (record.x, record.step, record.write, record.read)
    tokens = tuple(jnp.moveaxis(field, 1, 0).astype(dtype) for field in fields)

    def token(state: jax.Array, parts: tuple[Any, ...]) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        (x, step, write, read), sequence = parts
        if sequence is not None:
            state = jnp.where(sequence >= 0, first[jnp.maximum(sequence, 0)][None], state)
        after = jnp.exp(step[:, None] * decay) * state + write[..., None] * (step * x)[:, None]
        output = jnp.einsum("bei,be->bi", after, read, precision=lax.Precision.HIGHEST) + skip * x
        return after, (after, output, state)

    begin = first if start is None else jnp.zeros((1, *first.shape[1:]), first.dtype)
    final, found = lax.scan(token, begin, (tokens, start))
    return *found, final


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


def requests(record: SelectiveScan) -> tuple[dict[str, Any], ...]:
    """The owners of a record's entries: packed sequences, or the rows."""
    if record.cu_seqlens is None:
        return ({"b": np.arange(record.x.shape[0])},)
    return (packed_requests(record.cu_seqlens, record.x.shape[1], record.initial_state, record.state_slots),)


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
    requests=requests,
)
