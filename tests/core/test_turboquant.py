"""TurboQuant's functions: Max's codebooks, exact packing, errors of the paper's size, unbiased products."""

import functools
import importlib
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.quantization import turboquant

NORMAL_MEAN_SQUARE_ERRORS = {1: 0.3634, 2: 0.1175, 3: 0.03454, 4: 0.009497}
"""Bits -> mean square error of the optimal quantiser of N(0, 1), from Max 1960, table 1."""


@functools.cache
def tables(size, projections=0):
    return turboquant.generate_rotation_matrix(0, size), turboquant.generate_projection_matrix(1, projections, size)


@pytest.mark.parametrize("bits", NORMAL_MEAN_SQUARE_ERRORS)
def test_codebooks_have_the_errors_of_the_optimal_quantiser_of_normal_numbers(bits):
    book = turboquant.get_codebook(bits, 64)
    x = np.random.default_rng(bits).normal(size=200_000) / 8
    error = x - book.centroids[np.searchsorted(book.boundaries, x)]
    assert np.mean(error**2) * 64 == pytest.approx(NORMAL_MEAN_SQUARE_ERRORS[bits], rel=0.02)
    np.testing.assert_allclose(book.centroids, -book.centroids[::-1], atol=1e-6)
    assert (book.n_levels, book.bits, book.dim) == (2**bits, bits, 64)


def test_the_codebook_of_the_sphere_is_that_of_its_own_coordinates():
    # In three dimensions, coordinates are uniform on [-1, 1] (Archimedes), and so are the entries.
    centroids = turboquant.solve_lloyd_max(2, 3, use_gaussian_approx=False).centroids
    np.testing.assert_allclose(centroids, [-0.75, -0.25, 0.25, 0.75], atol=1e-6)
    wide = turboquant.solve_lloyd_max(3, 4096, use_gaussian_approx=False).centroids
    np.testing.assert_allclose(wide, turboquant.solve_lloyd_max(3, 4096).centroids, rtol=2e-3)


@pytest.mark.parametrize("bits", [1, 2, 3, 4])
def test_packed_codes_are_a_stream_of_bits_from_the_lowest_on(bits):
    codes = np.random.default_rng(0).integers(0, 2**bits, (5, 24), dtype=np.uint8)
    stream = np.unpackbits(codes[..., None], axis=-1, count=bits, bitorder="little").reshape(5, -1)
    packed = turboquant.pack_codes(codes, bits)
    np.testing.assert_array_equal(packed, np.packbits(stream, axis=-1, bitorder="little"))
    np.testing.assert_array_equal(turboquant.unpack_codes(packed, bits), codes)


def test_the_older_names_of_packing_are_those_of_4_bits_and_of_signs():
    codes, signs = np.arange(16, dtype=np.uint8), np.array([1, 0, 0, 0, 0, 0, 1, 1], bool)
    assert turboquant.pack_4bit(codes).tolist()[:2] == [0x10, 0x32]
    assert turboquant.unpack_4bit(turboquant.pack_4bit(codes)).tolist() == codes.tolist()
    assert turboquant.pack_signs(signs).tolist() == [0b11000001]
    assert turboquant.unpack_signs(turboquant.pack_signs(signs)).tolist() == [1, -1, -1, -1, -1, -1, 1, 1]
    for path in ("codebook", "matrices", "ops", "packing"):
        assert importlib.import_module(f"ejkernel.quantization.turboquant.{path}") is turboquant


def test_rotations_are_orthogonal_and_projections_have_variance_1():
    rotation, projection = tables(64, 256)
    np.testing.assert_allclose(rotation @ rotation.T, np.eye(64), atol=1e-5)
    assert float(jnp.std(projection)) == pytest.approx(1, rel=0.02)


def test_values_of_any_direction_have_the_error_of_the_codebook():
    rotation, _ = tables(64)
    values = np.zeros((64, 64), np.float32)  # before the rotation, a coordinate has everything
    values[np.arange(64), np.arange(64)] = np.linspace(-50, 50, 64)
    codebook = turboquant.get_codebook(3, 64).centroids
    codes, norms = turboquant.turboquant_compress_values(values, rotation, codebook, bits=3, norms_dtype=jnp.float32)
    assert codes.shape == (64, 24)
    decoded = turboquant.turboquant_dequantize_values(codes, norms, codebook, rotation)
    error = np.sum((decoded - values) ** 2, axis=-1) / np.sum(values**2, axis=-1)
    assert np.mean(error) == pytest.approx(NORMAL_MEAN_SQUARE_ERRORS[3], rel=0.1)


def test_products_with_keys_are_unbiased_over_projections():
    size, projections = 32, 4096
    rotation, projection = tables(size, projections)
    codebook = turboquant.get_codebook(1, size).centroids
    query, keys = np.split(np.random.default_rng(0).normal(size=(9, size)).astype(np.float32), [1])
    compressed = turboquant.turboquant_compress_keys(keys, rotation, codebook, projection, norms_dtype=jnp.float32)
    codes, signs, norms = (x[:, None] for x in compressed)
    rotated = (query @ rotation.T)[None, None]
    scores = turboquant.turboquant_asymmetric_scores(
        rotated, rotated @ projection.T, codes, norms, signs, codebook, projections
    )[0, 0, 0]
    exact = (keys @ query[0]).astype(np.float64)
    # The deviation over projections is |q| |r| sqrt((pi / 2 - cos^2) / Q), here at most 3% of |q| |k|.
    bound = 4 * np.linalg.norm(query) * np.asarray(norms)[:, 0, 1] * math.sqrt(math.pi / 2 / projections)
    assert (abs(scores - exact) < bound).all()
    without = turboquant.turboquant_asymmetric_scores(
        rotated, jnp.zeros((1, 1, 1, 0)), codes, norms, signs[..., :0], codebook, 0
    )[0, 0, 0]
    assert np.std(scores - exact) < np.std(without - exact) / 5


def test_zero_vectors_are_zero_again():
    rotation, _ = tables(64)
    codebook = turboquant.get_codebook(4, 64).centroids
    codes, norms = turboquant.turboquant_compress_values(jnp.zeros((2, 64)), rotation, codebook)
    assert not np.any(turboquant.turboquant_dequantize_values(codes, norms, codebook, rotation))


@pytest.mark.parametrize("scale", [1e-30, 1e25])
def test_norms_are_those_of_vectors_whose_squares_are_no_float32(scale):
    rotation, projection = tables(64, 64)
    codebook, scale = turboquant.get_codebook(4, 64).centroids, np.float32(scale)
    x = jnp.cos(jnp.arange(128.0)).reshape(2, 64)
    at_scale, at_one = (
        turboquant.turboquant_compress_keys(each, rotation, codebook, projection, norms_dtype=jnp.float32)[2]
        for each in (x * scale, x)
    )
    np.testing.assert_allclose(at_scale / scale, at_one, rtol=1e-5)


def test_vectors_may_be_given_by_name():
    rotation, _ = tables(8)
    codebook = turboquant.get_codebook(4, 8).centroids
    x = jnp.arange(8.0)[None]
    named = turboquant.turboquant_compress_values(values=x, rotation_matrix=rotation, value_codebook=codebook)
    for got, want in zip(named, turboquant.turboquant_compress_values(x, rotation, codebook), strict=True):
        np.testing.assert_array_equal(got, want)


def test_codes_have_no_derivative_and_decoded_values_have():
    rotation, projection = tables(8, 8)
    codebook = jnp.asarray(turboquant.get_codebook(4, 8).centroids)
    x = jnp.arange(8.0)[None]
    for function, arguments in (
        (turboquant.turboquant_compress_values, (rotation, codebook)),
        (turboquant.turboquant_compress_keys, (rotation, codebook, projection)),
        (turboquant.quantize_to_indices, (codebook,)),
    ):
        with pytest.raises(NotImplementedError, match=f"{function.__name__}: codes have no derivative"):
            jax.grad(lambda x, f=function, a=arguments: jnp.sum(jnp.asarray(f(x, *a)[-1], float)))(x)
    codes, norms = turboquant.turboquant_compress_values(x, rotation, codebook)
    gradient = jax.grad(lambda n: turboquant.turboquant_dequantize_values(codes, n, codebook, rotation).sum())(norms)
    decoded = turboquant.turboquant_dequantize_values(codes, norms, codebook, rotation)
    assert float(gradient[0] * norms[0]) == pytest.approx(float(decoded.sum()), rel=2e-2)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: turboquant.solve_lloyd_max(0), r"bits: got 0, wants 1 to 8"),
        (lambda: turboquant.solve_lloyd_max(2, 1), r"dim: got 1, wants at least 2"),
        (lambda: turboquant.pack_codes(np.zeros((2, 4), int), 3), r"codes: got shape \(2, 4\), wants"),
        (lambda: turboquant.pack_codes(np.zeros(8, int), 5), r"bits: got 5, wants 1, 2, 3 or 4"),
        (
            lambda: turboquant.unpack_codes(np.zeros(4, np.uint8), 3),
            r"packed: got shape \(4,\), wants .* multiples of 3",
        ),
        (
            lambda: turboquant.turboquant_compress_values(jnp.ones((2, 8)), jnp.eye(4), jnp.ones(4)),
            r"rotation_matrix: got shape \(4, 4\), wants \[D=8, D=8\]",
        ),
        (
            lambda: turboquant.turboquant_compress_values(jnp.ones((2, 8)), jnp.eye(8), jnp.ones(9), bits=3),
            r"value_codebook: got shape \(9,\), wants \[levels\] with 1 to 8 levels",
        ),
        (
            lambda: turboquant.turboquant_compress_keys(jnp.ones((2, 8)), jnp.eye(8), jnp.ones(4), jnp.ones((7, 8))),
            r"projection_matrix: got shape \(7, 8\), wants \[Q, D=8\] with Q a multiple of 8",
        ),
        (
            lambda: turboquant.turboquant_dequantize_values(jnp.zeros((2, 5)), jnp.ones(2), jnp.ones(4), jnp.eye(8)),
            r"packed_indices: got shape \(2, 5\), wants .* one of 1, 2, 3, 4",
        ),
        (
            lambda: turboquant.turboquant_dequantize_values(
                jnp.zeros((2, 3, 4)), jnp.ones(3), jnp.ones(16), jnp.eye(8)
            ),
            r"norms: got shape \(3,\), wants \(2, 3\)",
        ),
    ],
)
def test_wrong_arguments_are_errors_that_name_them(call, message):
    with pytest.raises(ValueError, match=message):
        call()
