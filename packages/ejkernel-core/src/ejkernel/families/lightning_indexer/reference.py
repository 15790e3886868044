"""Defines what the lightning indexer computes, in plain jnp.

A query t has a score for each key s from `key_starts[t]` to `key_ends[t] - 1`, summed over the indexer's heads:

    a_ths = scale <q_th, k_s> c_s                        c the scales of the keys; 1 where there are none
    I_ts = sum over h of w_th max(0, a_ths)              a_ths itself without `rectify`

With blocks of n > 1 keys, the score of block m is the largest I_ts of its keys that the query may select,
m n <= s < (m + 1) n; a block without any cannot be selected.

The query selects the K keys (or blocks) with the largest scores, the largest first, of equal scores the one with the
lower index. Scores are compared as numbers in float32 (float64 for float64 queries): -0 equals 0, NaN of either sign is
above infinity, and NaNs equal each other. A query with fewer keys has index -1 and score -inf in the remaining entries.

Indices have no gradient. With the cotangent dI of the selected scores, 0 where there is no key; that of a block is its
key's with the largest score, of equal ones the first:

    dw_th = sum over s of dI_ts max(0, a_ths)
    da_ths = scale c_s dI_ts w_th where a_ths > 0, else 0
    dq_th = sum over s of da_ths k_s          dk_s = sum over t, h of da_ths q_th

Sources: the lightning indexer of DeepSeek Sparse Attention, DeepSeek-V3.2-Exp (DeepSeek-AI, 2025); blocks without
`rectify`: MiniMax Sparse Attention, arXiv:2606.13392.
"""

import jax
import jax.numpy as jnp
from jax import lax

from ejkernel.arithmetic import cdiv
from ejkernel.families.expert_routing import order_preserving_integers
from ejkernel.families.lightning_indexer.record import (
    LightningIndexer,
    TopKeyIndicesAndScores,
    accumulator,
    num_keys,
    rectify,
    take_keys,
)
from ejkernel.planning.page_slots import slots_of_tokens


def reference(record: LightningIndexer) -> tuple[TopKeyIndicesAndScores, tuple[()]]:
    """Computes the result of the family in plain jnp, all scores at once; in float64 if `query` is float64, else in
    float32.

    Returns:
        Indices [B, T, K] int32 and scores [B, T, K]. There are no residuals.
    """
    dtype, least = accumulator(record), jnp.iinfo(f"int{jnp.finfo(accumulator(record)).bits}").min
    scores, selectable = _scores_of_every_key(record)
    in_order = jnp.where(selectable, order_preserving_integers(lax.stop_gradient(scores)), least)
    if record.block_size > 1:
        scores, in_order = _largest_of_blocks(scores, in_order, record.block_size)
    missing = max(0, record.top_k - scores.shape[2])
    padded = jnp.pad(in_order, ((0, 0), (0, 0), (0, missing)), constant_values=least)
    selected, indices = lax.top_k(padded, record.top_k)
    indices = jnp.where(selected > least, indices.astype(jnp.int32), -1)
    if not scores.shape[2]:
        return (indices, jnp.full(indices.shape, -jnp.inf, dtype)), ()
    taken = jnp.take_along_axis(scores, jnp.maximum(indices, 0), axis=2)
    return (indices, jnp.where(indices >= 0, taken, -jnp.inf)), ()


def _scores_of_every_key(record: LightningIndexer) -> tuple[jax.Array, jax.Array]:
    """Returns the score of each query and key, [B, T, S], and whether the query may select the key."""
    dtype, key, scales = accumulator(record), record.key, record.key_scales
    index = jnp.arange(num_keys(record), dtype=jnp.int32)
    selectable = (index >= record.key_starts[..., None]) & (index < record.key_ends[..., None])
    if record.block_tables is not None:
        tables, pages = record.block_tables, key.shape[:2]
        slots = slots_of_tokens(index, jnp.arange(tables.shape[0])[:, None], tables, (pages[0], pages[1]))
        key = take_keys(key.reshape(-1, key.shape[2]), slots)
        scales = None if scales is None else take_keys(scales.reshape(-1, 1), slots)[..., 0]
        selectable &= (slots >= 0)[:, None]
    query, key, weights = (x.astype(dtype) for x in (record.query, key, record.weights))
    products = jnp.einsum("bthd,bsd->bths", query, key, precision=lax.Precision.HIGHEST) * record.softmax_scale
    if scales is not None:
        products = products * scales.astype(dtype)[:, None, None]
    products = rectify(products) if record.rectify else products
    return jnp.sum(weights[..., None] * products, axis=2), selectable


def _largest_of_blocks(scores: jax.Array, in_order: jax.Array, size: int) -> tuple[jax.Array, jax.Array]:
    """Returns the score of each block of keys, [B, T, M], and its integer in the order of numbers."""
    rows, tokens, keys = scores.shape
    blocks = (rows, tokens, cdiv(keys, size), size)
    padding = ((0, 0), (0, 0), (0, blocks[2] * size - keys))
    in_order = jnp.pad(in_order, padding, constant_values=jnp.iinfo(in_order.dtype).min).reshape(blocks)
    first = jnp.argmax(in_order, axis=3, keepdims=True)
    largest = jnp.take_along_axis(jnp.pad(scores, padding).reshape(blocks), first, axis=3)
    return largest[..., 0], jnp.max(in_order, axis=3)
