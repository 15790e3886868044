"""TurboQuant's functions: codebooks, random matrices, packing, and keys and values as codes (arXiv:2504.19874).

`ragged_page_attention_v2_turboquant` and `ragged_page_attention_v3_turboquant` read caches in this format;
`ejkernel.planning.turboquant` has the formulas. Codes have no derivative: differentiating a function that makes some is
an error that names it. The functions that read codes have true derivatives with respect to norms, codebooks and
matrices.
"""

import functools
import inspect
import math
from collections.abc import Callable
from typing import Any, TypeVar, cast

import jax
import jax.numpy as jnp

from ejkernel.planning import turboquant
from ejkernel.planning.turboquant import CODE_BITS
from ejkernel.promotion import with_standard_promotion
from ejkernel.quantization.lloyd_max import LloydMaxCodebook, get_codebook, solve_lloyd_max

__all__ = [
    "LloydMaxCodebook",
    "dequantize_from_indices",
    "generate_projection_matrix",
    "generate_rotation_matrix",
    "get_codebook",
    "pack_4bit",
    "pack_codes",
    "pack_signs",
    "quantize_to_indices",
    "solve_lloyd_max",
    "turboquant_asymmetric_scores",
    "turboquant_compress_keys",
    "turboquant_compress_values",
    "turboquant_dequantize_values",
    "unpack_4bit",
    "unpack_codes",
    "unpack_signs",
]

# `ejkernel.quantization.turboquant.codebook` is an old import path below this module, which has to be a package for it.
__path__: list[str] = []

Function = TypeVar("Function", bound=Callable[..., Any])


def _refuse_derivatives(function: Function) -> Function:
    """Makes differentiating a function with respect to its first argument an error that names the function."""
    name, signature = function.__name__, inspect.signature(function)
    first = next(iter(signature.parameters))

    @jax.custom_jvp
    def without_derivative(x: jax.Array) -> jax.Array:
        return x

    @without_derivative.defjvp
    def _(primals: Any, tangents: Any) -> Any:
        raise NotImplementedError(
            f"{name}: codes have no derivative; stop the gradient of its first argument, or add a straight-through "
            "estimate: x + jax.lax.stop_gradient(decoded - x)"
        )

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs)
        given.arguments[first] = without_derivative(jnp.asarray(given.arguments[first]))
        return function(*given.args, **given.kwargs)

    return cast(Function, run)


@_refuse_derivatives
@with_standard_promotion
def quantize_to_indices(x: jax.Array, centroids: jax.Array) -> jax.Array:
    """Returns uint8 indices of the entries [levels] of a codebook that are nearest to x [...]."""
    return turboquant.nearest_codes(x, jnp.asarray(centroids))


@with_standard_promotion
def dequantize_from_indices(indices: jax.Array, centroids: jax.Array) -> jax.Array:
    """Returns the entries [...] of a codebook [levels] at indices [...]."""
    return turboquant.code_values(indices, jnp.asarray(centroids))


@with_standard_promotion
def generate_rotation_matrix(seed: int, head_dim: int, dtype: Any = jnp.float32) -> jax.Array:
    """Returns a random rotation or reflection [D, D], uniform over the orthogonal matrices (Mezzadri 2007).

    Args:
        seed: Seed.
        head_dim: D.
        dtype: Of the result.
    """
    normal = jax.random.normal(jax.random.key(seed), (head_dim, head_dim), jnp.float32)
    q, r = jnp.linalg.qr(normal)
    # The signs of R's diagonal make the decomposition unique; without them Q is not uniform.
    return (q * jnp.where(jnp.diagonal(r) < 0, -1, 1)).astype(dtype)


@with_standard_promotion
def generate_projection_matrix(seed: int, projection_dim: int, head_dim: int, dtype: Any = jnp.float32) -> jax.Array:
    """Returns the random matrix P [Q, D] of residual signs, with entries of N(0, 1).

    Args:
        seed: Seed; another one than the rotation's, so that the two are independent.
        projection_dim: Q.
        head_dim: D.
        dtype: Of the result.
    """
    return jax.random.normal(jax.random.key(seed), (projection_dim, head_dim), jnp.float32).astype(dtype)


def pack_codes(codes: jax.Array, bits: int) -> jax.Array:
    """Returns bytes uint8 [..., C * bits / 8] of codes [..., C], the first in the lowest bits.

    Args:
        codes: [..., C] integers below 2 ** bits.
        bits: 1, 2, 3 or 4.

    Raises:
        ValueError: `bits` is none of these, or C codes do not fill bytes.
    """
    codes = jnp.asarray(codes)
    _check_bits(bits)
    if codes.ndim == 0 or codes.shape[-1] * bits % 8:
        raise ValueError(f"codes: got shape {codes.shape}, wants [..., C] with C * {bits} bits in whole bytes")
    return turboquant.pack_codes(codes, bits)


def unpack_codes(packed: jax.Array, bits: int) -> jax.Array:
    """Returns codes uint8 [..., C] of bytes [..., C * bits / 8].

    Raises:
        ValueError: `bits` is not 1, 2, 3 or 4, or the bytes do not hold whole codes.
    """
    packed = jnp.asarray(packed)
    _check_bits(bits)
    if packed.ndim == 0 or packed.shape[-1] * 8 % math.lcm(bits, 8):
        raise ValueError(
            f"packed: got shape {packed.shape}, wants [..., bytes] in multiples of {math.lcm(bits, 8) // 8}"
        )
    return turboquant.unpack_codes(packed, bits)


def pack_4bit(indices: jax.Array) -> jax.Array:
    """Returns `pack_codes(indices, 4)`: bytes [..., C / 2] of codes [..., C]."""
    return pack_codes(indices, 4)


def unpack_4bit(packed: jax.Array) -> jax.Array:
    """Returns `unpack_codes(packed, 4)`: codes [..., C] of bytes [..., C / 2]."""
    return unpack_codes(packed, 4)


def pack_signs(signs: jax.Array) -> jax.Array:
    """Returns bytes [..., Q / 8] of signs [..., Q], True or 1 for +."""
    return pack_codes(jnp.asarray(signs) != 0, 1)


def unpack_signs(packed: jax.Array) -> jax.Array:
    """Returns signs [..., Q] of bytes [..., Q / 8], float32 1 and -1."""
    return 2.0 * unpack_codes(packed, 1).astype(jnp.float32) - 1.0


@_refuse_derivatives
@with_standard_promotion
def turboquant_compress_keys(
    keys: jax.Array,
    rotation_matrix: jax.Array,
    key_codebook: jax.Array,
    projection_matrix: jax.Array,
    bits: int = 4,
    norms_dtype: Any = jnp.bfloat16,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns keys as codes, signs and norms.

    Args:
        keys: [..., D] floating.
        rotation_matrix: [D, D].
        key_codebook: [levels], at most 2 ** bits.
        projection_matrix: [Q, D], Q a multiple of 8; 0 leaves the residual out.
        bits: Bits that a code takes: 1, 2, 3 or 4.
        norms_dtype: Of the norms.

    Returns:
        Codes uint8 [..., D * bits / 8], signs uint8 [..., Q / 8], and the norms [..., 2] of keys and of residuals.

    Raises:
        ValueError: A shape or `bits` is wrong.

    Example:
        ```python
        import jax
        from ejkernel.quantization import turboquant

        keys = jax.random.normal(jax.random.key(0), (10, 64))
        rotation = turboquant.generate_rotation_matrix(1, 64)
        projection = turboquant.generate_projection_matrix(2, 64, 64)
        codebook = turboquant.get_codebook(3, 64).centroids
        codes, signs, norms = turboquant.turboquant_compress_keys(keys, rotation, codebook, projection, bits=3)
        assert (codes.shape, signs.shape, norms.shape) == ((10, 24), (10, 8), (10, 2))
        ```
    """
    codebook = _checked_codebook("key_codebook", key_codebook, bits)
    rotation = _checked_rotation("keys", keys, rotation_matrix, bits)
    projection = jnp.asarray(projection_matrix)
    if projection.ndim != 2 or projection.shape[0] % 8 or projection.shape[1] != keys.shape[-1]:
        raise ValueError(
            f"projection_matrix: got shape {projection.shape}, wants [Q, D={keys.shape[-1]}] with Q a multiple of 8"
        )
    codes, signs, norms = turboquant.encode_keys(keys, rotation, codebook, projection, bits)
    return codes, signs, norms.astype(norms_dtype)


@_refuse_derivatives
@with_standard_promotion
def turboquant_compress_values(
    values: jax.Array,
    rotation_matrix: jax.Array,
    value_codebook: jax.Array,
    bits: int = 4,
    norms_dtype: Any = jnp.bfloat16,
) -> tuple[jax.Array, jax.Array]:
    """Returns values [..., D] as codes uint8 [..., D * bits / 8] and norms [...]; arguments as those for keys.

    Raises:
        ValueError: A shape or `bits` is wrong.
    """
    codebook = _checked_codebook("value_codebook", value_codebook, bits)
    rotation = _checked_rotation("values", values, rotation_matrix, bits)
    codes, norms, _ = turboquant.encode_vectors(values, rotation, codebook, bits)
    return codes, norms.astype(norms_dtype)


@with_standard_promotion
def turboquant_dequantize_values(
    packed_indices: jax.Array, norms: jax.Array, value_codebook: jax.Array, rotation_matrix: jax.Array
) -> jax.Array:
    """Returns values [..., D] float32 of codes [..., D * bits / 8] and norms [...]; D is that of the rotation [D, D].

    Raises:
        ValueError: The codes do not fit the rotation, or the norms the codes.
    """
    rotation, norms = jnp.asarray(rotation_matrix), jnp.asarray(norms).astype(jnp.float32)
    bits = bits_of_codes("packed_indices", packed_indices, rotation.shape[-1])
    _check_norms("norms", norms, packed_indices)
    rotated = turboquant.decode_vectors(packed_indices, norms, jnp.asarray(value_codebook), bits)
    return turboquant.rotate_back(rotated, rotation)


@with_standard_promotion
def turboquant_asymmetric_scores(
    q_rotated: jax.Array,
    q_projected: jax.Array,
    k_packed_indices: jax.Array,
    k_norms: jax.Array,
    k_packed_signs: jax.Array,
    key_codebook: jax.Array,
    qjl_dim: int,
) -> jax.Array:
    """Returns the products of queries with keys that are codes, unbiased over projections.

    Args:
        q_rotated: R q, [B, Hk, G, D].
        q_projected: P R q, [B, Hk, G, Q], products of the projection's rows with the rotated queries.
        k_packed_indices: uint8 [K, Hk, D * bits / 8].
        k_norms: [K, Hk, 2], of keys and of residuals.
        k_packed_signs: uint8 [K, Hk, Q / 8].
        key_codebook: [levels].
        qjl_dim: Q.

    Returns:
        Products [B, Hk, G, K].

    Raises:
        ValueError: Codes or signs do not fit the queries, or the norms the codes.
    """
    bits = bits_of_codes("k_packed_indices", k_packed_indices, q_rotated.shape[-1])
    _check_norms("k_norms", k_norms, k_packed_indices, 2)
    if not q_projected.shape[-1] == 8 * k_packed_signs.shape[-1] == qjl_dim:
        raise ValueError(
            f"qjl_dim: got {qjl_dim} with q_projected of shape {q_projected.shape} and k_packed_signs of shape "
            f"{k_packed_signs.shape}, wants Q of [B, Hk, G, Q] and [K, Hk, Q / 8]"
        )
    norms = k_norms.astype(jnp.promote_types(q_rotated.dtype, jnp.float32))
    queries = jnp.concatenate((q_rotated, q_projected * turboquant.residual_factor(qjl_dim)), axis=-1)
    keys = turboquant.decode_keys(k_packed_indices, k_packed_signs, norms, jnp.asarray(key_codebook), bits)
    return jnp.einsum("bhgd,khd->bhgk", queries, keys, precision=jax.lax.Precision.HIGHEST)


def bits_of_codes(name: str, packed: Any, dim: int) -> int:
    """Returns the bits of a code, from the size of D codes [..., D * bits / 8].

    Args:
        name: Argument name for the message.
        packed: The codes.
        dim: D.

    Raises:
        ValueError: There are no codes of 1 to 4 bits of that size.
    """
    bits = next((bits for bits in CODE_BITS if packed.shape[-1] * 8 == bits * dim), None)
    if bits is None or dim * bits % math.lcm(bits, 8):
        sizes = ", ".join(f"{dim * bits // 8}" for bits in CODE_BITS if not dim * bits % math.lcm(bits, 8))
        raise ValueError(
            f"{name}: got shape {tuple(packed.shape)}, wants [..., D * bits / 8] with 1 to 4 bits for D={dim}: one of "
            f"{sizes or 'none'}"
        )
    return bits


def _check_norms(name: str, norms: Any, codes: Any, *parts: int) -> None:
    expected = (*codes.shape[:-1], *parts)
    if tuple(norms.shape) != expected:
        raise ValueError(
            f"{name}: got shape {tuple(norms.shape)}, wants {expected} for codes of shape {tuple(codes.shape)}"
        )


def _check_bits(bits: int) -> None:
    if bits not in CODE_BITS:
        raise ValueError(f"bits: got {bits!r}, wants 1, 2, 3 or 4")


def _checked_codebook(name: str, codebook: Any, bits: int) -> jax.Array:
    _check_bits(bits)
    codebook = jnp.asarray(codebook)
    if codebook.ndim != 1 or not 0 < codebook.shape[0] <= 2**bits:
        raise ValueError(
            f"{name}: got shape {codebook.shape}, wants [levels] with 1 to {2**bits} levels for bits={bits}"
        )
    return codebook


def _checked_rotation(name: str, vectors: jax.Array, rotation_matrix: Any, bits: int) -> jax.Array:
    rotation, dim = jnp.asarray(rotation_matrix), vectors.shape[-1] if vectors.ndim else 0
    if not dim or not jnp.issubdtype(vectors.dtype, jnp.floating) or dim * bits % math.lcm(bits, 8):
        raise ValueError(
            f"{name}: got {vectors.dtype}{list(vectors.shape)}, wants floating [..., D] with D * {bits} bits in whole "
            "bytes"
        )
    if rotation.shape != (dim, dim):
        raise ValueError(f"rotation_matrix: got shape {rotation.shape}, wants [D={dim}, D={dim}]")
    return rotation
