"""Defines what segment pooling computes, in plain jnp.

Every pool is a run of tokens of one batch row, given by its first token and the token after its last:

    o_p = (sum of the values of the tokens of pool p) / (number of tokens of pool p)

A pool without tokens is 0, and so is the gradient of a token in no pool. Sums are taken in float32 (float64 for
float64 values).

Source: the compression of keys in blocks of Yuan et al. 2025, arXiv:2502.11089 (native sparse attention), is the mean
over a chunk; the mean over a sequence is the sentence embedding of Reimers & Gurevych 2019, arXiv:1908.10084.
"""

import jax
import jax.numpy as jnp
from jax import lax

from ejkernel.families.segment_pooling.record import SegmentPooling, accumulator, pool_bounds


def reference(record: SegmentPooling) -> tuple[jax.Array, tuple[()]]:
    """Computes the result of the family in plain jnp, with one weight for every pool and token; in float64 if `values`
    is float64, else in float32.

    Returns:
        [B, M, H, D] in the values' dtype. There are no residuals.
    """
    values, (first, end) = record.values.astype(accumulator(record)), pool_bounds(record)
    token = jnp.arange(values.shape[1], dtype=jnp.int32)
    inside = (token >= first[..., None]) & (token < end[..., None])
    inside = jnp.broadcast_to(inside, (values.shape[0], *inside.shape[1:]))
    values = jnp.where(inside.any(axis=1)[..., None, None], values, 0)
    weights = inside / jnp.maximum(end - first, 1)[..., None].astype(values.dtype)
    output = jnp.einsum("bmt,bthd->bmhd", weights, values, precision=lax.Precision.HIGHEST)
    return output.astype(record.values.dtype), ()
