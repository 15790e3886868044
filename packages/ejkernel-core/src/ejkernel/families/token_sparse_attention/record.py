"""Defines the argument record of token-sparse attention, and functions of the record alone."""

from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.planning.fp8_latents import unpack_fp8_latents
from ejkernel.types.arguments import arguments, array, static

FP8_LATENTS = "fp8_latents"
"""The format of keys that are latent vectors of 8 bits with their scales and a rotary key."""


@arguments
class TokenSparseAttention:
    """Canonical input of one call. B batch, T queries, S keys, H query heads, Hk KV heads, D and Dv sizes.

    Attributes:
        query: [B, T, H, D] floating.
        key: [B, S, Hk, D], same dtype as query.
        indices: [B, T, Hk|1, K] int32, the keys that the query heads of each KV head read; below 0 for none. A key that
            is listed n times counts n times.
        softmax_scale: Factor on the raw scores.
        value_size: Dv.
        value: [B, S, Hk, Dv], same dtype as query; None where the first Dv entries of each key are its value.
        softmax_aux: [H] float32, one sink logit per head.
        key_format: `FP8_LATENTS` where key is [B, S, Hk, bytes] uint8, rows of `ejkernel.planning.fp8_latents` of
            `value_size` channels and a rotary key, and value is None; None where it holds numbers.
    """

    query: jax.Array = array("b t h d", gradient=True)
    key: jax.Array = array("b s g d", gradient=True)
    indices: jax.Array = array("b t g k")
    softmax_scale: float = static()
    value_size: int = static()
    value: jax.Array | None = array("b s g v", gradient=True, default=None)
    softmax_aux: jax.Array | None = array("h", gradient=True, default=None)
    key_format: str | None = static(default=None)


def accumulator(record: TokenSparseAttention) -> Any:
    """Returns the dtype of scores, sums and products: float32, or float64 for float64 queries."""
    return jnp.promote_types(record.query.dtype, jnp.float32)


def decode_keys(rows: jax.Array, record: TokenSparseAttention, dtype: Any) -> jax.Array:
    """Returns keys [..., D] in a dtype, from rows of the record's keys in their format."""
    return (rows if record.key_format is None else unpack_fp8_latents(rows, record.value_size)).astype(dtype)
