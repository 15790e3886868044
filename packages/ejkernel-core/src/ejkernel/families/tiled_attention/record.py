"""Defines the argument record of tiled softmax attention, and functions of the record alone."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ejkernel.planning import dropout
from ejkernel.types.arguments import arguments, array, arrays_of_function, static
from ejkernel.types.integers import NO_LIMIT
from ejkernel.types.pair_functions import PairFunction
from ejkernel.types.sparse_masks import Mask

Window = tuple[int | None, int | None]
FAR = NO_LIMIT


@arguments
class TiledAttention:
    """Canonical input of one attention call. B batch, T queries, S keys, H query heads, Hk KV heads, D and Dv sizes.

    Attributes:
        query: [B, T, H, D] floating.
        key: [B, S, Hk, D], same dtype as query.
        value: [B, S, Hk, Dv], same dtype as query.
        softmax_scale: Factor on the raw scores.
        bias: [B|1, H|1, T|1, S|1] floating, added to the scaled scores.
        alibi_slopes: [B|1, H] floating: slope m of the term `-m |k - q|` of the scores, k and q the positions.
        relative_bias: [H, 2 R + 1] floating, added to the scores: entry `R + clip(j - i, -R, R)` for query i and key j,
            by their indices in the whole call.
        score_mod: `(score, b, h, q_idx, k_idx) -> score`, applied to the soft-capped scores; indices in the whole call.
        mask: [B|1, H|1, T|1, S|1] bool, True attends.
        mask_mod: `(b, h, q_idx, k_idx) -> bool`, True attends; indices in the whole call.
        q_segment_ids: [B, T] int32; with kv_segment_ids: equal ids >= 0 attend, < 0 is padding.
        kv_segment_ids: [B, S] int32.
        q_positions: [B|1, T] int32 that causal and window compare instead of the query index; at most
            `ejkernel.types.integers.POSITION_LIMIT` from 0, so that differences and sums with a window stay in int32.
        kv_positions: [B|1, S] int32, the same for keys.
        softmax_aux: [H] float32, one sink logit a head.
        dropout_seed: uint32 scalar.
        dropout_origin: [4] int32, global (batch, head, query, key) index of this record's first element, for
            records that are one shard of a call; None is all zeros. `pattern`, `score_mod` and `mask_mod` also use
            indices that count from it.
        dropout_prob: Probability of dropping a weight, in [0, 1).
        causal: Key position at most query position.
        sliding_window: (left, right), inclusive; None on a side leaves it open.
        pattern: Pairs that attend by their indices in the whole call, known when it is traced.
        logits_soft_cap: Cap c of `c * tanh(s / c)`.
        normalize_output: False returns the numerator relative to the row's maximum, `sum_j exp(s_ij - max_j s_ij) v_j`.
        precision: Of the matrix products; None for what `ejkernel.planning.precision` says.
        logits_dtype: Scores are rounded to it before the softmax.
    """

    query: jax.Array = array("b t h d", gradient=True)
    key: jax.Array = array("b s g d", gradient=True)
    value: jax.Array = array("b s g v", gradient=True)
    softmax_scale: float = static()
    bias: jax.Array | None = array("b h t s", gradient=True, default=None)
    alibi_slopes: jax.Array | None = array("b h", default=None)
    relative_bias: jax.Array | None = array("h r", gradient=True, default=None)
    score_mod: PairFunction | None = arrays_of_function(gradient=True, default=None)
    mask: jax.Array | None = array("b h t s", default=None)
    mask_mod: PairFunction | None = arrays_of_function(default=None)
    q_segment_ids: jax.Array | None = array("b t", default=None)
    kv_segment_ids: jax.Array | None = array("b s", default=None)
    q_positions: jax.Array | None = array("b t", default=None)
    kv_positions: jax.Array | None = array("b s", default=None)
    softmax_aux: jax.Array | None = array("h", gradient=True, default=None)
    dropout_seed: jax.Array | None = array("", default=None)
    dropout_origin: jax.Array | None = array("c", default=None)
    dropout_prob: float = static(0.0)
    causal: bool = static(False)
    sliding_window: Window | None = static(None)
    pattern: Mask | None = static(default=None)
    logits_soft_cap: float | None = static(None)
    normalize_output: bool = static(True)
    precision: lax.Precision | None = static(default=None)
    logits_dtype: Any = static(jnp.dtype("float32"))


@arguments
class SoftmaxResiduals:
    """The residuals of a forward pass, in addition to the output.

    Attributes:
        lse: [B, H, T] float32, log of the softmax denominator, sink included; -inf for empty rows.
        row_max: [B, H, T] float32, the largest allowed score; only if not `normalize_output`.
        row_argmax: [B, H, T] int32, the key of the largest score; only if not `normalize_output`.
    """

    lse: jax.Array
    row_max: jax.Array | None = None
    row_argmax: jax.Array | None = None


def causal_window_bounds(record: TiledAttention) -> Window:
    """Returns (left, right) such that causal and window together allow `-left <= k - q <= right`; None is unbounded.

    A side of `FAR` or more is unbounded too: int32 positions plus such a side would wrap around.
    """
    left, right = (side if side is None or side < FAR else None for side in record.sliding_window or (None, None))
    if record.causal:
        right = 0 if right is None else min(right, 0)
    return left, right


def query_and_key_positions(record: TiledAttention) -> tuple[jax.Array, jax.Array]:
    """Returns query and key positions, [B|1, T] and [B|1, S] int32."""
    q, k = record.q_positions, record.kv_positions
    q = jnp.arange(record.query.shape[1], dtype=jnp.int32)[None] if q is None else q
    k = jnp.arange(record.key.shape[1], dtype=jnp.int32)[None] if k is None else k
    return q, k


def indices_in_call(record: TiledAttention) -> tuple[jax.Array, ...]:
    """Returns the indices of batch rows, heads, queries and keys in the whole call, int32 [B, 1, 1, 1], [1, H, 1, 1],
    [1, 1, T, 1] and [1, 1, 1, S].
    """
    (b, t, h, _), s = record.query.shape, record.key.shape[1]
    origin = jnp.zeros(4, jnp.int32) if record.dropout_origin is None else record.dropout_origin
    axes = enumerate((b, h, t, s))
    return tuple((jnp.arange(n, dtype=jnp.int32) + origin[i]).reshape(_one_axis(i, n)) for i, n in axes)


def _one_axis(axis: int, size: Any) -> tuple[Any, ...]:
    return tuple(size if i == axis else 1 for i in range(4))


def make_dropout_keys(record: TiledAttention) -> tuple[jax.Array, jax.Array]:
    """Returns the dropout keys of rows [B, H, T] and of columns [1, S], uint32, of a record with a seed.

    Computing the keys costs more than using them, so they are computed once before the kernel.
    """
    (b, t, h, _), s = record.query.shape, record.key.shape[1]
    origin = jnp.zeros(4, jnp.int32) if record.dropout_origin is None else record.dropout_origin
    batch, head, query, key = (jnp.arange(n, dtype=jnp.int32) + origin[i] for i, n in enumerate((b, h, t, s)))
    assert record.dropout_seed is not None  # the caller looked
    rows = dropout.row_keys(record.dropout_seed, batch[:, None, None], head[:, None], query)
    return rows, dropout.column_keys(key)[None]
