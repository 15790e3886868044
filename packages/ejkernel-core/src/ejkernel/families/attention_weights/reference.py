"""Defines what attention that returns its weights computes, in plain jnp.

The record is `TiledAttention` and means what it means there; the output is a pair:

    o_i  = sum_j w_ij v_j                     [B, T, H, Dv]
    w_ij = dropout_ij * p_ij                  [B, H, T, S], what multiplies the values

in the query's dtype both, and `normalize_output` is always True. The weights are as large as they are: this family is
for looking at them, `ejkernel.families.tiled_attention` is for memory linear in the lengths.
"""

import dataclasses

import jax
import jax.numpy as jnp

from ejkernel.families import tiled_attention
from ejkernel.families.tiled_attention import SoftmaxResiduals, TiledAttention

OutputAndWeights = tuple[jax.Array, jax.Array]


def reference(record: TiledAttention) -> tuple[OutputAndWeights, SoftmaxResiduals]:
    """Computes the result of the family in plain jnp. The weight of a key is the output for values that are 1 at that
    key and 0 elsewhere.
    """
    output, residuals = tiled_attention.reference(record)
    (batch, keys, heads, _), dtype = record.key.shape, record.value.dtype
    unit = jnp.broadcast_to(jnp.eye(keys, dtype=dtype)[:, None], (batch, keys, heads, keys))
    weights, _ = tiled_attention.reference(dataclasses.replace(record, value=unit))
    return (output, weights.swapaxes(1, 2)), residuals
