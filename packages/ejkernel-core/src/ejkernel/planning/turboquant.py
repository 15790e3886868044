"""TurboQuant: vectors as a norm and one code per rotated coordinate (Zandieh et al. 2025, arXiv:2504.19874).

With a random rotation R [D, D], the same for all vectors, a vector x is stored as

    |x|                                                      its norm
    code_i = argmin_c |y_i - codebook[c]|,  y = R x / |x|    one code per coordinate

Whatever x is, the coordinates of y are distributed as those of a random point of the unit sphere, close to N(0, 1 / D),
so that one codebook serves all. The products of queries with such a vector have a bias. Keys therefore also store the
residual r = R x - |x| codebook[code] as its norm and the signs of its products with the rows of P [Q, D], which has
entries of N(0, 1). With these (QJL, arXiv:2406.03482) the expectation over P of the product is exact:

    <q, x> = |x| <R q, codebook[code]> + |r| sqrt(pi / 2) / Q <P R q, signs>

This is one product of D + Q columns: `extended_queries` has R q and sqrt(pi / 2) / Q P R q, and `decode_keys` has
|x| codebook[code] and |r| signs. Values need no residual; their weighted sum is rotated back once, by `rotate_back`.

Codes of b bits lie one after the other in bytes, the first in the lowest bits; a sign is a code of one bit, 1 for + and
for 0.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

CODE_BITS = (1, 2, 3, 4)
"""Bits that a code may have."""


class EncodedVectors(NamedTuple):
    """Vectors [..., D] as codes.

    Attributes:
        codes: uint8 [..., D * bits / 8].
        norms: [...], float32 or float64.
        residuals: [..., D], what the codes leave of the rotated vectors.
    """

    codes: jax.Array
    norms: jax.Array
    residuals: jax.Array


class EncodedKeys(NamedTuple):
    """Keys [..., D] as codes, and the signs of Q products with their residuals.

    Attributes:
        codes: uint8 [..., D * bits / 8].
        signs: uint8 [..., Q / 8].
        norms: [..., 2], of the keys and of their residuals.
    """

    codes: jax.Array
    signs: jax.Array
    norms: jax.Array


def pack_codes(codes: jax.Array, bits: int) -> jax.Array:
    """Returns bytes uint8 [..., C * bits / 8] of codes [..., C] below 2 ** bits."""
    codes_per_group, bytes_per_group = _group(bits)
    groups = codes.astype(jnp.uint32).reshape(*codes.shape[:-1], codes.shape[-1] // codes_per_group, codes_per_group)
    words = jnp.sum(groups << (bits * jnp.arange(codes_per_group, dtype=jnp.uint32)), axis=-1, dtype=jnp.uint32)
    packed = words[..., None] >> (8 * jnp.arange(bytes_per_group, dtype=jnp.uint32)) & 0xFF
    return packed.astype(jnp.uint8).reshape(*codes.shape[:-1], codes.shape[-1] * bits // 8)


def unpack_codes(packed: jax.Array, bits: int) -> jax.Array:
    """Returns codes uint8 [..., C] of bytes [..., C * bits / 8]."""
    codes_per_group, bytes_per_group = _group(bits)
    count = packed.shape[-1] * 8 // bits
    groups = packed.astype(jnp.uint32).reshape(*packed.shape[:-1], packed.shape[-1] // bytes_per_group, bytes_per_group)
    words = jnp.sum(groups << (8 * jnp.arange(bytes_per_group, dtype=jnp.uint32)), axis=-1, dtype=jnp.uint32)
    codes = words[..., None] >> (bits * jnp.arange(codes_per_group, dtype=jnp.uint32)) & (2**bits - 1)
    return codes.astype(jnp.uint8).reshape(*packed.shape[:-1], count)


def _group(bits: int) -> tuple[int, int]:
    """Returns the least number of codes that fill whole bytes, and the number of these bytes."""
    size = math.lcm(bits, 8)
    return size // bits, size // 8


def nearest_codes(x: jax.Array, codebook: jax.Array) -> jax.Array:
    """Returns uint8 indices of the entries of a codebook that are nearest to numbers; the first of two as near."""
    return jnp.argmin(jnp.abs(x[..., None] - codebook), axis=-1).astype(jnp.uint8)


def code_values(codes: jax.Array, codebook: jax.Array) -> jax.Array:
    """Returns the entries of a codebook at codes; its last one for codes that it does not have."""
    return jnp.take(codebook, codes.astype(jnp.int32), mode="clip")


def encode_vectors(x: jax.Array, rotation: jax.Array, codebook: jax.Array, bits: int) -> EncodedVectors:
    """Returns the codes, norms and residuals of vectors.

    Args:
        x: [..., D] floating.
        rotation: R [D, D].
        codebook: [at most 2 ** bits].
        bits: Bits of a code.
    """
    dtype = jnp.promote_types(x.dtype, jnp.float32)
    x, codebook = x.astype(dtype), codebook.astype(dtype)
    norms = _norms(x)
    rotated = _product(x, rotation.astype(dtype))
    codes = nearest_codes(rotated / jnp.where(norms > 0, norms, 1)[..., None], codebook)
    return EncodedVectors(pack_codes(codes, bits), norms, rotated - norms[..., None] * code_values(codes, codebook))


def encode_keys(
    keys: jax.Array, rotation: jax.Array, codebook: jax.Array, projection: jax.Array, bits: int
) -> EncodedKeys:
    """Returns keys as codes, with the signs and the norms of their residuals.

    Args:
        keys: [..., D] floating.
        rotation: R [D, D].
        codebook: [at most 2 ** bits].
        projection: P [Q, D], Q a multiple of 8.
        bits: Bits of a code.
    """
    codes, norms, residuals = encode_vectors(keys, rotation, codebook, bits)
    signs = _product(residuals, projection.astype(residuals.dtype)) >= 0
    return EncodedKeys(codes, pack_codes(signs, 1), jnp.stack((norms, _norms(residuals)), axis=-1))


def decode_vectors(codes: jax.Array, norms: jax.Array, codebook: jax.Array, bits: int) -> jax.Array:
    """Returns rotated vectors [..., D], in the dtype of their norms.

    Args:
        codes: uint8 [..., D * bits / 8].
        norms: [...] floating.
        codebook: [levels].
        bits: Bits of a code.
    """
    return norms[..., None] * code_values(unpack_codes(codes, bits), codebook.astype(norms.dtype))


def decode_signs(signs: jax.Array, norms: jax.Array) -> jax.Array:
    """Returns the signs [..., Q] of bytes [..., Q / 8] times norms [...], in the dtype of these."""
    return jnp.where(unpack_codes(signs, 1) == 1, norms[..., None], -norms[..., None])


def decode_keys(
    codes: jax.Array, signs: jax.Array | None, norms: jax.Array, codebook: jax.Array, bits: int
) -> jax.Array:
    """Returns keys [..., D + Q] for products with `extended_queries`, in the dtype of their norms.

    Args:
        codes: uint8 [..., D * bits / 8].
        signs: uint8 [..., Q / 8]; None for Q = 0.
        norms: [..., 2] floating, of the keys and of their residuals.
        codebook: [levels].
        bits: Bits of a code.
    """
    vectors = decode_vectors(codes, norms[..., 0], codebook, bits)
    return vectors if signs is None else jnp.concatenate((vectors, decode_signs(signs, norms[..., 1])), axis=-1)


def extended_queries(queries: jax.Array, rotation: jax.Array, projection: jax.Array) -> jax.Array:
    """Returns queries [..., D] as [..., D + Q] in their dtype: rotated, then their products with the projection."""
    dtype = jnp.promote_types(queries.dtype, jnp.float32)
    rotated = _product(queries.astype(dtype), rotation.astype(dtype))
    projected = _product(rotated, projection.astype(dtype)) * residual_factor(projection.shape[0])
    return jnp.concatenate((rotated, projected), axis=-1).astype(queries.dtype)


def residual_factor(projections: int) -> float:
    """Returns sqrt(pi / 2) / Q: what makes the product with Q signs an unbiased one with the residual's direction."""
    return math.sqrt(math.pi / 2) / max(projections, 1)


def rotate_back(rotated: jax.Array, rotation: jax.Array) -> jax.Array:
    """Returns vectors [..., D] of rotated ones, in their dtype."""
    dtype = jnp.promote_types(rotated.dtype, jnp.float32)
    return _product(rotated.astype(dtype), rotation.astype(dtype).T).astype(rotated.dtype)


def _norms(x: jax.Array) -> jax.Array:
    """Returns the norms [...] of vectors [..., D].

    The squares are those of vectors divided by a power of two, which is exact but for entries too small to matter:
    the square of a float32 above 1.8e19 is infinite, and that of one below 1e-23 is 0.
    """
    _, exponents = jnp.frexp(jnp.max(jnp.abs(x), axis=-1, initial=0))
    scales = jnp.ldexp(jnp.ones((), x.dtype), exponents - 1)
    return scales * jnp.sqrt(jnp.sum((x / scales[..., None]) ** 2, axis=-1))


def _product(x: jax.Array, matrix: jax.Array) -> jax.Array:
    """Returns [..., M] products of vectors [..., D] with the rows of a matrix [M, D]."""
    return jnp.einsum("...d,md->...m", x, matrix, precision=lax.Precision.HIGHEST)
