"""Defines what the selective scan computes, in plain jnp.

Every channel i of every row carries a state h of E numbers. For each token t, in order:

    h_t = exp(dt_ti * A_i) * h_{t-1} + dt_ti * x_ti * B_t       zero-order hold on A, Euler on B
    y_ti = <h_t, C_t> + D_i * x_ti                              read after write

States and sums are in float32 (float64 for float64 x).

Source: Gu & Dao 2023, arXiv:2312.00752 (Mamba).
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ejkernel.families.selective_scan import packed_scan
from ejkernel.families.selective_scan.record import (
    TOKENS_PER_STORED_STATE,
    ScanResiduals,
    SelectiveScan,
    accumulator,
    first_state,
)
from ejkernel.planning import packing, slots


def reference(record: SelectiveScan) -> tuple[tuple[jax.Array, jax.Array], ScanResiduals]:
    """Computes the result of the family, one token at a time; in float64 if `x` is float64, else in float32.

    Returns:
        Output [B, T, I] in x's dtype, final states [B, I, E] in the accumulator's, and the residuals. Of packed
        sequences, final states are [N, I, E], or the slots.
    """
    if record.cu_seqlens is not None:
        return _packed_reference(record, record.cu_seqlens)
    _, outputs, before, final = _scan_tokens(record, first_state(record), None)
    residuals = ScanResiduals(states=jnp.moveaxis(before[::TOKENS_PER_STORED_STATE], 0, 1))
    return (jnp.moveaxis(outputs, 0, 1).astype(record.x.dtype), jnp.swapaxes(final, 1, 2)), residuals


def _packed_reference(
    record: SelectiveScan, cu_seqlens: jax.Array
) -> tuple[tuple[jax.Array, jax.Array], ScanResiduals]:
    """Computes the result of packed sequences, each of which begins with its own state."""
    original, tokens = record, record.x.shape[1]
    if original.initial_state is not None and original.state_slots is not None:
        held = slots.read_slots(original.initial_state, original.state_slots, cu_seqlens)
        record = dataclasses.replace(record, initial_state=held, state_slots=None)
    ids, position = (x[0] for x in packing.packed_ids(cu_seqlens, tokens))
    first, real = first_state(record), (ids >= 0)[None, :, None]
    # Padding tokens do not change the state, even if they hold NaN.
    clean = {name: jnp.where(real, getattr(record, name), 0) for name in ("x", "step", "write", "read")}
    start = jnp.where((ids >= 0) & (position == 0), ids, -1)
    after, outputs, before, _ = _scan_tokens(dataclasses.replace(record, **clean), first, start)
    last = cu_seqlens[1:].astype(jnp.int32) - 1
    final = jnp.where((jnp.diff(cu_seqlens) > 0)[:, None, None], after[jnp.maximum(last, 0), 0], first)
    final = jnp.swapaxes(final, 1, 2)
    if original.initial_state is not None and original.state_slots is not None:
        final = slots.write_slots(original.initial_state, original.state_slots, cu_seqlens, final)
    at = packed_scan.make_interval_table(cu_seqlens, tokens)
    states = packed_scan.zero_unused_states(cu_seqlens, before[jnp.clip(at.begin, 0, tokens - 1), 0][None])
    output = jnp.where(real, jnp.moveaxis(outputs, 0, 1), 0).astype(record.x.dtype)
    return (output, final), ScanResiduals(states=states)


def _scan_tokens(record: SelectiveScan, first: jax.Array, start: jax.Array | None) -> tuple[jax.Array, ...]:
    """Returns the states after every token, outputs, and the states before every token, all token-major; and the final
    states.

    Args:
        record: The record.
        first: [B, E, I], the states before the first token; of packed sequences [N, E, I].
        start: [T], the sequence that begins at a token, -1 for none; None without packing.
    """
    dtype = accumulator(record)
    decay, skip = record.decay.T.astype(dtype), record.skip.astype(dtype)
    fields = (record.x, record.step, record.write, record.read)
    tokens = tuple(jnp.moveaxis(field, 1, 0).astype(dtype) for field in fields)

    def run_token(state: jax.Array, parts: tuple[Any, ...]) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        (x, step, write, read), sequence = parts
        if sequence is not None:
            state = jnp.where(sequence >= 0, first[jnp.maximum(sequence, 0)][None], state)
        after = jnp.exp(step[:, None] * decay) * state + write[..., None] * (step * x)[:, None]
        output = jnp.einsum("bei,be->bi", after, read, precision=lax.Precision.HIGHEST) + skip * x
        return after, (after, output, state)

    begin = first if start is None else jnp.zeros((1, *first.shape[1:]), first.dtype)
    final, per_token = lax.scan(run_token, begin, (tokens, start))
    return *per_token, final
