"""Rows that operations compute outside of their kernels, in a `batch_invariant` block."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from ejkernel.modules import expert_routing, gated_delta_rule
from ejkernel.modules.operations.shared.recurrences import l2_normalised
from ejkernel.modules.operations.shared.turboquant_caches import new_token_fields
from ejkernel.ops import batch_invariant, forward_mode, registry
from ejkernel.ops.invariant_rows import compute_rows, product_tile_rows

X = jax.random.normal(jax.random.key(0), (37, 5, 64))
SLICES = (slice(0, 1), slice(36, 37), slice(3, 5), slice(1, 4), slice(5, 20), slice(2, 37))


def root_mean_squares(x, weight):
    return x * jax.lax.rsqrt(jnp.mean(x**2, axis=-1, keepdims=True) + 1e-6) * weight


@functools.partial(jax.jit, static_argnums=1)
def in_rows(x, axes=2):
    return compute_rows(root_mean_squares, (x,), (jnp.cos(jnp.arange(64.0)),), axes=axes)


@pytest.mark.parametrize("function", [in_rows, jax.jit(l2_normalised)])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_row_has_the_same_bits_in_every_batch(function, dtype):
    x = X.astype(dtype)
    with batch_invariant():
        whole = function(x)
        for rows in SLICES:
            np.testing.assert_array_equal(function(x[rows]), whole[rows])
    np.testing.assert_allclose(whole.astype(jnp.float32), function(x).astype(jnp.float32), rtol=1e-2, atol=1e-6)


def test_outside_of_a_block_the_function_gets_the_arrays_as_they_are():
    def run(x):
        return in_rows.__wrapped__(x)

    assert str(jax.make_jaxpr(run)(X)) == str(
        jax.make_jaxpr(lambda x: root_mean_squares(x, jnp.cos(jnp.arange(64.0))))(X)
    )
    with batch_invariant():
        assert "while" in str(jax.make_jaxpr(run)(X))
        assert "while" not in str(jax.make_jaxpr(run)(X[:0]))  # no rows


def test_derivatives_are_those_of_the_plain_function():
    def loss(x):
        return jnp.sum(jnp.sin(in_rows(x)) + l2_normalised(x))

    x, t = X[:3], jnp.cos(X[:3])
    gradient, (_, product) = jax.grad(loss)(x), jax.jvp(jax.grad(loss), (x,), (t,))
    close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5)
    with batch_invariant():
        for found in (jax.grad(loss)(x), jax.jit(jax.grad(loss))(x), jax.grad(jax.checkpoint(loss))(x)):
            close(found, gradient)
        close(jax.jvp(jax.grad(loss), (x,), (t,))[1], product)
        close(jax.vmap(in_rows, in_axes=(0, None))(x, 1), in_rows(x))
        with forward_mode():
            close(jax.jvp(loss, (x,), (t,))[1], jnp.vdot(gradient, t), rtol=1e-3)
            close(jax.grad(loss)(x), gradient)


def test_weights_of_experts_have_their_gradient():
    def loss(logits):
        return jnp.sum(expert_routing(logits, 3, scores="softmax", normalise=True)[-1] ** 2)

    logits = X[:, 0]
    with batch_invariant():
        found = jax.grad(loss)(logits)
    np.testing.assert_allclose(found, jax.grad(loss)(logits), rtol=1e-4, atol=1e-6)


def test_a_delta_rule_over_devices_has_the_bits_of_each_row_alone():
    query, key, value = jax.random.normal(jax.random.key(1), (3, 4, 6, 2, 64))
    beta = jax.nn.sigmoid(value[..., 0])
    mesh = jax.make_mesh((2,), ("rows",))
    spec = PartitionSpec("rows")
    with batch_invariant():
        together = gated_delta_rule(query, key, value, beta, mesh=mesh, in_specs=(spec,) * 4, out_specs=spec)
        for n in range(4):
            alone = gated_delta_rule(*(x[n : n + 1] for x in (query, key, value, beta)))
            np.testing.assert_array_equal(together[n : n + 1], alone)


def test_new_tokens_of_a_turboquant_cache_have_the_same_codes_and_norms_in_every_batch():
    op = registry().op("ragged_page_attention_v3_turboquant")
    args = next(case for case in op.cases if "ci" in case.tags).make(jax.random.key(0))
    encode = jax.jit(lambda args: new_token_fields(args))
    tokens = {name: getattr(args, name) for name in ("queries", "keys", "values")}
    with batch_invariant():
        whole = encode(args)
        for first in range(tokens["keys"].shape[0]):
            alone = encode(type(args)(**(vars(args) | {name: x[first : first + 1] for name, x in tokens.items()})))
            for name, x in whole.items():
                np.testing.assert_array_equal(x[first : first + 1], alone[name], err_msg=name)
    for name, x in encode(args).items():
        np.testing.assert_allclose(x.astype(jnp.float32), whole[name].astype(jnp.float32), rtol=1e-5, err_msg=name)


@pytest.mark.parametrize(("heads", "rows"), [(1, 16), (4, 4), (16, 1), (6, 8), (5, 16)])
def test_a_tile_of_products_has_a_multiple_of_16_rows(heads, rows):
    assert product_tile_rows(heads) == rows
