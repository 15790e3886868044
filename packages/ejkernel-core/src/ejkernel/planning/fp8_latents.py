"""Rows of a latent cache in 8 bits, as FlashMLA's sparse decoding reads them.

A row is a token: a latent vector of R channels in float8_e4m3fn, a float32 scale for every 128 of them, and a rotary
key of Dr channels in bfloat16, in this order and in little-endian bytes:

    byte      0 .. R-1              R .. R + R/32 - 1              R + R/32 .. R + R/32 + 2 Dr - 1
              codes                 scales                         rotary key
    of 656    0 .. 511              512 .. 527                     528 .. 655          R = 512, Dr = 64

Channel c of the latent vector is `code[c] * scale[c // 128]`.

Source: the documentation of FlashMLA (DeepSeek-AI, 2025).
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

CHANNELS_PER_SCALE = 128
"""Channels of a latent vector that have a scale in common."""


def row_bytes(latent_size: int, rotary_size: int) -> int:
    """Returns the bytes of a row."""
    return latent_size + 4 * (latent_size // CHANNELS_PER_SCALE) + 2 * rotary_size


def unpack_fp8_latents(rows: jax.Array, latent_size: int) -> jax.Array:
    """Returns the latent vectors and rotary keys of rows [..., bytes] uint8: [..., R + Dr] float32."""
    scales = latent_size // CHANNELS_PER_SCALE
    codes = lax.bitcast_convert_type(rows[..., :latent_size], jnp.float8_e4m3fn).astype(jnp.float32)
    factors = _floats_of_bytes(rows[..., latent_size : latent_size + 4 * scales], jnp.float32)
    rotary = _floats_of_bytes(rows[..., latent_size + 4 * scales :], jnp.bfloat16).astype(jnp.float32)
    latents = codes.reshape(*codes.shape[:-1], scales, CHANNELS_PER_SCALE) * factors[..., None]
    return jnp.concatenate([latents.reshape(codes.shape), rotary], axis=-1)


def pack_fp8_latents(latents: jax.Array, latent_size: int) -> jax.Array:
    """Returns latent vectors and rotary keys [..., R + Dr] as rows [..., bytes] uint8.

    The scale of 128 channels makes the largest of them the largest float8_e4m3fn, 448. Channels that are all 0, or
    too small for a normal scale, have scale 1.

    Args:
        latents: [..., R + Dr] floating: the latent vector, then the rotary key, which is rounded to bfloat16.
        latent_size: R, a multiple of 128.
    """
    if latent_size % CHANNELS_PER_SCALE or not 0 < latent_size <= latents.shape[-1]:
        raise ValueError(
            f"latent_size: got {latent_size}, wants a multiple of {CHANNELS_PER_SCALE} of at most the "
            f"{latents.shape[-1]} entries of latents"
        )
    latent, rotary = latents[..., :latent_size].astype(jnp.float32), latents[..., latent_size:].astype(jnp.bfloat16)
    groups = latent.reshape(*latent.shape[:-1], latent_size // CHANNELS_PER_SCALE, CHANNELS_PER_SCALE)
    largest, limit = jnp.max(jnp.abs(groups), axis=-1), float(jnp.finfo(jnp.float8_e4m3fn).max)
    # A smaller scale would be subnormal, which some devices take for 0.
    scales = jnp.where(largest >= limit * jnp.finfo(jnp.float32).tiny, largest / limit, 1)
    # Rounded up, the largest number would be beyond the largest code, and a conversion would make it NaN.
    codes = jnp.clip(groups / scales[..., None], -limit, limit).astype(jnp.float8_e4m3fn).reshape(latent.shape)
    return jnp.concatenate([_bytes_of_floats(x) for x in (codes, scales, rotary)], axis=-1)


def _floats_of_bytes(values: jax.Array, dtype: Any) -> jax.Array:
    """Returns [..., n * itemsize] uint8 -> [..., n] of a dtype."""
    size = jnp.dtype(dtype).itemsize
    return lax.bitcast_convert_type(values.reshape(*values.shape[:-1], -1, size), dtype)


def _bytes_of_floats(values: jax.Array) -> jax.Array:
    """Returns [..., n] -> [..., n * itemsize] uint8."""
    parts = lax.bitcast_convert_type(values, jnp.uint8)
    return parts if values.dtype.itemsize == 1 else parts.reshape(*values.shape[:-1], -1)
