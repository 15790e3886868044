"""Defines what the lightning indexer computes, in plain jnp.

A query t has a score for each key s from `key_starts[t]` to `key_ends[t] - 1`, summed over the indexer's heads:

    I_ts = sum over h of w_th max(0, scale <q_th, k_s>)

and selects the K keys with the largest scores, the largest first, of equal scores the one with the lower index. Scores
are compared as numbers in float32 (float64 for float64 queries): -0 equals 0, NaN of either sign is above infinity, and
NaNs equal each other. A query with fewer keys has index -1 and score -inf in the remaining entries.

Indices have no gradient. With the cotangent dI of the selected scores, 0 where there is no key:

    dw_th = sum over s of dI_ts max(0, scale <q_th, k_s>)
    da_ths = scale dI_ts w_th where scale <q_th, k_s> > 0, else 0
    dq_th = sum over s of da_ths k_s          dk_s = sum over t, h of da_ths q_th

Source: the lightning indexer of DeepSeek Sparse Attention, DeepSeek-V3.2-Exp (DeepSeek-AI, 2025).
"""

import jax
import jax.numpy as jnp
from jax import lax

from ejkernel.families.expert_routing import order_preserving_integers
from ejkernel.families.lightning_indexer.record import LightningIndexer, TopKeyIndicesAndScores, accumulator


def reference(record: LightningIndexer) -> tuple[TopKeyIndicesAndScores, tuple[()]]:
    """Computes the result of the family in plain jnp, all scores at once; in float64 if `query` is float64, else in
    float32.

    Returns:
        Indices [B, T, K] int32 and scores [B, T, K]. There are no residuals.
    """
    dtype = accumulator(record)
    query, key, weights = (x.astype(dtype) for x in (record.query, record.key, record.weights))
    products = jnp.einsum("bthd,bsd->bths", query, key, precision=lax.Precision.HIGHEST) * record.softmax_scale
    scores = jnp.sum(weights[..., None] * jax.nn.relu(products), axis=2)
    index = jnp.arange(key.shape[1], dtype=jnp.int32)
    selectable = (index >= record.key_starts[..., None]) & (index < record.key_ends[..., None])
    in_order = order_preserving_integers(lax.stop_gradient(scores))
    in_order = jnp.where(selectable, in_order, jnp.iinfo(in_order.dtype).min)
    missing = max(0, record.top_k - key.shape[1])
    in_order = jnp.pad(in_order, ((0, 0), (0, 0), (0, missing)), constant_values=jnp.iinfo(in_order.dtype).min)
    selected, indices = lax.top_k(in_order, record.top_k)
    indices = jnp.where(selected > jnp.iinfo(in_order.dtype).min, indices.astype(jnp.int32), -1)
    if not key.shape[1]:
        return (indices, jnp.full(indices.shape, -jnp.inf, dtype)), ()
    taken = jnp.take_along_axis(scores, jnp.maximum(indices, 0), axis=2)
    return (indices, jnp.where(indices >= 0, taken, -jnp.inf)), ()
