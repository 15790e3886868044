"""Biases, limits, layouts and gradients of `gated_grouped_matmul`, against the calls that it takes the place of."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ejkernel
from ejkernel.modules import gated_grouped_matmul, grouped_matmul
from ejkernel.ops.plugins import registry

SIZES = jnp.array([7, 0, 12])
KEYS = jax.random.split(jax.random.key(0), 4)
TOKENS = jax.random.normal(KEYS[0], (9, 8))
MATRICES = jax.random.normal(KEYS[1], (3, 8, 10))
BIASES = jax.random.normal(KEYS[3], (3, 10))
INDICES = jax.random.randint(KEYS[2], (21,), -1, 10)
GPT_OSS = {"interleaved": True, "alpha": 1.702, "beta": 1.0, "limit": 0.9}


def by_hand(tokens, matrices, biases, options):
    """One expert after the other, in plain jnp: the rows of no token and of no group are 0."""
    rows = []
    for row, expert in enumerate(np.repeat(np.arange(3), SIZES)):
        token = int(INDICES[row])
        if not 0 <= token < len(tokens):
            rows.append(jnp.zeros(matrices.shape[-1] // 2 if options.get("gated", True) else matrices.shape[-1]))
            continue
        y = tokens[token] @ matrices[expert] + biases[expert]
        if not options.get("gated", True):
            rows.append(jnp.maximum(y, 0) ** 2)
            continue
        gate, factor = (y[::2], y[1::2]) if options.get("interleaved") else jnp.split(y, 2)
        limit = options.get("limit", jnp.inf)
        gate, factor = jnp.minimum(gate, limit), jnp.clip(factor, -limit, limit)
        rows.append(gate / (1 + jnp.exp(-options.get("alpha", 1.0) * gate)) * (factor + options.get("beta", 0.0)))
    rows += [jnp.zeros_like(rows[0])] * (len(INDICES) - len(rows))
    return jnp.stack(rows)


CASES = {"plain": {}, "gpt-oss": GPT_OSS, "no gate": {"gated": False, "activation": "relu2"}}


@pytest.mark.parametrize("options", CASES.values(), ids=CASES)
def test_values_and_gradients_are_those_of_the_formula(options: dict) -> None:
    def call(tokens, matrices, biases):
        return gated_grouped_matmul(tokens, matrices, SIZES, INDICES, rhs_bias=biases, **options)

    given = TOKENS, MATRICES, BIASES
    got, pullback = jax.vjp(call, *given)
    want, formula_pullback = jax.vjp(lambda *given: by_hand(*given, options), *given)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
    cotangent = jax.random.normal(jax.random.key(5), want.shape)
    for one, other in zip(pullback(cotangent), formula_pullback(cotangent), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4)


def test_matrices_with_their_columns_first() -> None:
    def loss(matrices, transpose):
        return jnp.sum(gated_grouped_matmul(TOKENS, matrices, SIZES, INDICES, transpose_rhs=transpose) ** 2)

    got, of_transposed = jax.value_and_grad(loss)(MATRICES.swapaxes(1, 2), True)
    want, gradient = jax.value_and_grad(loss)(MATRICES, False)
    np.testing.assert_allclose(got, want, rtol=1e-5)
    np.testing.assert_allclose(of_transposed, gradient.swapaxes(1, 2), rtol=1e-4, atol=1e-4)


def test_a_bias_may_have_the_shape_that_grouped_matmul_takes() -> None:
    got = gated_grouped_matmul(TOKENS[:3], MATRICES, jnp.array([1, 1, 1]), rhs_bias=BIASES[:, None])
    gate, factor = jnp.split(
        grouped_matmul(TOKENS[:3], MATRICES, jnp.array([1, 1, 1]), rhs_bias=BIASES[:, None]), 2, -1
    )
    np.testing.assert_allclose(got, jax.nn.silu(gate) * factor, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"activation": "relu2"}, "activation: got 'relu2' with a gate"),
        ({"gated": False, "beta": 1.0}, "beta: got 1.0 with gated=False"),
        ({"activation": "gelu", "alpha": 2.0}, "alpha: got 2.0 with activation='gelu'"),
        ({"limit": 0.0}, "limit: got 0"),
        ({"rhs_bias": BIASES[:, :9]}, r"rhs_bias: got shape \(3, 9\)"),
        ({"transpose_rhs": True}, "rhs: got shape"),
    ],
)
def test_options_that_do_not_fit_are_refused(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        gated_grouped_matmul(TOKENS, MATRICES, SIZES, INDICES, **options)


def test_matrices_of_8_bits_are_multiplied_with_their_scales() -> None:
    matrices, scales = MATRICES.astype(jnp.float8_e4m3fn), 1 + jax.random.uniform(KEYS[3], (3, 2, 1, 10))
    wide = matrices.astype(jnp.float32) * jnp.repeat(scales[:, :, 0], 4, axis=1)

    def loss(tokens: jax.Array, **given: jax.Array) -> jax.Array:
        return jnp.sum(jnp.sin(gated_grouped_matmul(tokens, group_sizes=SIZES, indices=INDICES, **given)))

    got = jax.value_and_grad(loss)(TOKENS, rhs=matrices, rhs_scale=scales)
    want = jax.value_and_grad(loss)(TOKENS, rhs=wide)
    for one, other in zip(got, want, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


def test_kernels_without_scales_refuse_them_by_name() -> None:
    given = {"rhs_scale": jnp.ones((3, 1, 1, 10)), "group_sizes": SIZES}
    table = str(ejkernel.explain(gated_grouped_matmul, TOKENS, MATRICES.astype(jnp.float8_e4m3fn), **given))
    assert "rhs_scale" in table
    known = registry().implementations["gated_grouped_matmul"]
    assert {one.platform for one in known if "rhs_scale" in one.requires.handles} == {"xla"}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"rhs_scale": jnp.ones((3, 3, 1, 10))}, "rhs_scale: got 3 blocks, wants a divisor of the 8"),
        ({"rhs_scale": jnp.ones((3, 1, 10))}, "rhs_scale: got shape"),
        ({"rhs_bits": 4}, "rhs_bits: got a value without rhs_mode"),
        ({"rhs_mode": "mxfp4"}, "rhs_scale: got None with rhs_mode 'mxfp4'"),
    ],
)
def test_scales_that_do_not_fit_are_refused(given: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        gated_grouped_matmul(TOKENS, MATRICES, SIZES, **given)
