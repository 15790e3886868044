"""Defines the argument record of ring attention, and functions of the record alone."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ejkernel.families.tiled_attention import TiledAttention, Window
from ejkernel.types.arguments import arguments, arrays_of_function, static
from ejkernel.types.pair_functions import PairFunction


@arguments
class RingAttention:
    """Canonical input of one call, as one device sees it. T queries and S keys are its own, K keys are everyone's.

    Attributes:
        query: [B, T, H, D] floating.
        key: [B, S, Hk, D], same dtype as query.
        value: [B, S, Hk, Dv], same dtype as query.
        softmax_scale: Factor on the raw scores.
        axis_name: Mesh axis the sequence is spread over; None where one device has all of it. Where no such axis is
            bound, as when a part of a call is measured by itself, the part is a whole.
        bias: [B|1, H|1, T|1, K|1] floating, added to the scaled scores.
        score_mod: `(score, b, h, q_idx, k_idx) -> score`, applied to the soft-capped scores; q_idx and k_idx
            are indices in the whole sequence, b and h in the whole call.
        mask: [B|1, H|1, T|1, K|1] bool, True attends.
        mask_mod: `(b, h, q_idx, k_idx) -> bool`, True attends; the same indices.
        index_origin: [4] int32, global (batch, head, query, key) index of this record's first element, for
            `score_mod` and `mask_mod`; a ring computes the last two itself. None is all zeros.
        q_segment_ids: [B, T] int32; with kv_segment_ids: equal ids >= 0 attend, < 0 is padding.
        kv_segment_ids: [B, S] int32.
        q_positions: [B|1, T] int32 that causal and window compare instead of the query's index in the whole.
        kv_positions: [B|1, S] int32, the same for keys.
        softmax_aux: [H] float32, one sink logit a head.
        causal: Key position at most query position.
        sliding_window: (left, right), inclusive; None on a side leaves it open.
        logits_soft_cap: Cap c of `c * tanh(s / c)`.
    """

    query: jax.Array
    key: jax.Array
    value: jax.Array
    softmax_scale: float = static()
    axis_name: str | None = static()
    bias: jax.Array | None = None
    score_mod: PairFunction | None = arrays_of_function(gradient=True, default=None)
    mask: jax.Array | None = None
    mask_mod: PairFunction | None = arrays_of_function(default=None)
    q_segment_ids: jax.Array | None = None
    kv_segment_ids: jax.Array | None = None
    q_positions: jax.Array | None = None
    kv_positions: jax.Array | None = None
    softmax_aux: jax.Array | None = None
    index_origin: jax.Array | None = None
    causal: bool = static(False)
    sliding_window: Window | None = static(None)
    logits_soft_cap: float | None = static(None)


def is_axis_bound(axis_name: str) -> bool:
    """Returns whether the caller runs once for every device along a mesh axis."""
    try:
        lax.axis_size(axis_name)
    except NameError:
        return False
    return True


def axis_size(axis_name: str | None) -> int:
    """Returns devices along a mesh axis; 1 where it is not bound."""
    return lax.axis_size(axis_name) if axis_name is not None and is_axis_bound(axis_name) else 1


def as_tiled_attention(record: RingAttention) -> TiledAttention:
    """Returns the record of a sequence that is all here, as tiled attention."""
    names = {field.name for field in dataclasses.fields(record)} - {"axis_name", "index_origin"}
    return TiledAttention(dropout_origin=record.index_origin, **{name: getattr(record, name) for name in names})


def has_functions(record: RingAttention) -> bool:
    """Returns whether a record has functions of pairs, which read indices."""
    return record.score_mod is not None or record.mask_mod is not None


def origin_of_pairs(record: RingAttention, first_query: Any, first_key: Any) -> jax.Array:
    """Returns the index in the whole call of the first row, head, query and key of a part, int32 [4]."""
    origin = jnp.zeros(4, jnp.int32) if record.index_origin is None else record.index_origin.astype(jnp.int32)
    return origin.at[2].set(first_query).at[3].set(first_key)


def with_gathered_keys(record: RingAttention) -> RingAttention:
    """Returns the record with the keys of all devices, and with its queries' positions in the whole."""
    names = ("key", "value", "kv_segment_ids", "kv_positions")
    whole = {
        name: None if (x := getattr(record, name)) is None else lax.all_gather(x, record.axis_name, axis=1, tiled=True)
        for name in names
    }
    length = record.query.shape[1]
    first = lax.axis_index(record.axis_name) * length
    if record.q_positions is None:
        whole["q_positions"] = (jnp.arange(length, dtype=jnp.int32) + first)[None]
    if has_functions(record):
        whole["index_origin"] = origin_of_pairs(record, first, 0)
    return dataclasses.replace(record, **whole)
