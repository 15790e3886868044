"""Segments that share tiles of attention, kept apart whatever they hold: NaN and infinities stay in their own segment.

A tile of scores has pairs of several segments, and a product multiplies the weight of each, 0 where they differ, with
the other's rows: 0 x NaN is NaN. So the rows that are multiplied are made finite, and what was not is marked where only
pairs that attend are read:

    forward     value   0 instead of what is not finite       key     NaN where the value was not
    backward    q, k, v, do, o   in the same way                     lse     NaN in rows where q, do, o or lse were not

"Finite" means so in a product too: the largest float32 numbers are brought down to the largest of TF32, because a
tensor core rounds them to infinity. Each is off by at most a part in 2,048.

A score of NaN is masked by selecting, never by adding or multiplying, so a mark reaches what attends and nothing else.
The cost is a pass over keys and values before the forward kernel, and over the arrays of the backward one, of calls
with segment ids alone; XLA fuses it with what makes them. So it is for calls in an `isolate_sequences` block.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

FIELDS = ("query", "key", "value")

MAX_TF32 = (2 - 2.0**-10) * 2.0**127
"""The largest number of TF32, to which float32 products on tensor cores round their operands."""


def has_segments(record: Any) -> bool:
    """Returns whether a record of attention has segments, which may share tiles."""
    return record.q_segment_ids is not None and record.kv_segment_ids is not None


def move_nonfinite_values_to_keys(record: Any) -> Any:
    """Returns a record of attention whose values are finite; the keys of those that were not are NaN."""
    if record.q_segment_ids is None or record.kv_segment_ids is None:
        return record
    return dataclasses.replace(record, **nonfinite_values_to_keys(record.key, record.value))


def nonfinite_values_to_keys(key: jax.Array, value: jax.Array) -> dict[str, jax.Array]:
    """Returns finite values [B, S, Hk, Dv], and keys [B, S, Hk, D] that are NaN where the values were not."""
    is_finite = jnp.isfinite(value).all(axis=-1, keepdims=True)
    return {"key": jnp.where(is_finite, key, jnp.nan), "value": finite_or_zero(value)}


def isolate_pullback(pullback: Any) -> Any:
    """Returns a pullback of attention whose arrays are finite, with lse NaN in rows that had something else."""
    record = pullback.record
    if record.q_segment_ids is None or record.kv_segment_ids is None:
        return pullback
    residuals, lse = pullback.residuals, pullback.residuals.lse
    finite = finite_rows(record.query) & (jnp.isfinite(lse) | (lse == -jnp.inf))
    for tree in (pullback.output, pullback.cotangent):
        first, *weights = jax.tree.leaves(tree)  # [B, T, H, D], and of some families the weights [B, H, T, S]
        finite = functools.reduce(jnp.logical_and, [jnp.isfinite(x).all(axis=-1) for x in weights], finite)
        finite &= finite_rows(first)
    more: dict[str, Any] = {}
    if pullback.lse_cotangent is not None:
        finite &= jnp.isfinite(pullback.lse_cotangent)
        more["lse_cotangent"] = finite_or_zero(pullback.lse_cotangent)
    # The gradient of padding is 0, even if padding holds NaN.
    finite |= (record.q_segment_ids < 0)[:, None]
    shifts = {name: getattr(residuals, name, None) for name in ("lse", "row_max")}
    shifts = {name: jnp.where(finite, x, jnp.nan) for name, x in shifts.items() if x is not None}
    return dataclasses.replace(
        pullback,
        record=dataclasses.replace(record, **{name: finite_or_zero(getattr(record, name)) for name in FIELDS}),
        residuals=dataclasses.replace(residuals, **shifts),
        output=jax.tree.map(finite_or_zero, pullback.output),
        cotangent=jax.tree.map(finite_or_zero, pullback.cotangent),
        **more,
    )


def mark_nonfinite_rows_in_lse(cotangent: jax.Array, lse: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns finite cotangents [B, T, H, Dv], and lse [B, H, T] that is NaN where they were not."""
    return finite_or_zero(cotangent), jnp.where(finite_rows(cotangent), lse, jnp.nan)


def finite_or_zero(x: jax.Array) -> jax.Array:
    """Returns x with 0 instead of NaN and infinities, and float32 numbers no larger than TF32 has."""
    return jnp.where(jnp.isfinite(x), jnp.clip(x, -MAX_TF32, MAX_TF32) if x.dtype == jnp.float32 else x, 0)


def finite_rows(x: jax.Array) -> jax.Array:
    """Returns which rows of [B, T, H, D] are finite, [B, H, T]."""
    return jnp.isfinite(x).all(axis=-1).swapaxes(1, 2)
