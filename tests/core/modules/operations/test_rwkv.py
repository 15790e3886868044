"""What RWKV's operations have in common with others, and what they refuse."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

from ejkernel.modules import gated_linear_attention, kernel_delta_attention, rwkv4, rwkv6, rwkv7, rwkv7_mul

R, K, V, W = jax.random.normal(jax.random.key(0), (4, 2, 11, 2, 8))
U = jax.random.normal(jax.random.key(1), (2, 8))
W = -jnp.exp(W)


def test_rwkv6_with_a_bonus_of_one_and_no_decay_is_linear_attention():
    got = rwkv6(R, K, V, jnp.zeros_like(W), jnp.ones_like(U))
    np.testing.assert_allclose(got, gated_linear_attention(R, K, V), rtol=1e-5, atol=1e-5)


def test_rwkv7_has_the_delta_rule_with_gates_as_a_special_case():
    key = K / jnp.linalg.norm(K, axis=-1, keepdims=True)
    beta = jax.nn.sigmoid(R[..., 0])
    strength = beta[..., None]
    got, state = rwkv7(R, W, strength * key, V, -strength * key, jnp.exp(W) * key, return_state=True)
    want, last = kernel_delta_attention(R, key, V, beta, W, use_qk_l2norm=False, return_state=True)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(state, last, rtol=1e-5, atol=1e-5)


def test_decays_of_any_strength_are_exact_and_have_gradients():
    direction = K / jnp.linalg.norm(K, axis=-1, keepdims=True)
    decay = jnp.where(jnp.arange(11)[:, None, None] % 3 == 0, -jnp.inf, -300.0) * jnp.ones_like(W)

    def loss(w):
        return jnp.sum(rwkv7_mul(R, w, K, V, direction, jnp.full_like(R, 0.5)) ** 2)

    value, gradient = jax.value_and_grad(loss)(decay)
    assert jnp.isfinite(value)
    assert jnp.isfinite(gradient).all()


def test_rwkv4_is_exact_for_keys_of_100():
    """The largest key of a channel decides, and no gradient overflows."""
    k = 100 * jax.random.normal(jax.random.key(2), (2, 9, 4))
    v = jax.random.normal(jax.random.key(3), (2, 9, 4))
    zeros = jnp.zeros(4)

    def loss(k):
        return jnp.sum(rwkv4(zeros, zeros, k, v) ** 2)

    decayed = k[:, None] - jnp.maximum(jnp.arange(9)[:, None] - jnp.arange(9) - 1, 0)[..., None]
    weights = jax.nn.softmax(jnp.where(jnp.tri(9, dtype=bool)[..., None], decayed, -jnp.inf), axis=2)
    want = jnp.einsum("btsc,bsc->btc", weights, v, precision="highest")
    np.testing.assert_allclose(rwkv4(zeros, zeros, k, v), want, rtol=1e-4, atol=1e-5)
    assert jnp.isfinite(jax.grad(loss)(k)).all()


def test_a_token_of_rwkv4_without_any_weight_has_output_and_gradient_0():
    k = jnp.full((1, 3, 2), -jnp.inf).at[:, 2].set(0.0)
    v = jnp.ones((1, 3, 2))
    gradient = jax.grad(lambda v: jnp.sum(rwkv4(jnp.zeros(2), jnp.zeros(2), k, v)))(v)
    np.testing.assert_array_equal(rwkv4(jnp.zeros(2), jnp.zeros(2), k, v)[0, :, 0], [0, 0, 1])
    np.testing.assert_array_equal(gradient[0, :, 0], [0, 0, 1])


@pytest.mark.needs("2 devices")
@pytest.mark.parametrize("name", ["rwkv6", "rwkv7"])
def test_tokens_may_be_split_over_devices(name):
    mesh = jax.make_mesh((2,), ("sp",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    r, k, v, w, short = (x[:, :10] for x in (R, K, V, W, K / jnp.linalg.norm(K, axis=-1, keepdims=True)))
    calls = {"rwkv6": (rwkv6, (r, k, v, w, U)), "rwkv7": (rwkv7, (r, w, k, v, 0.5 * short, -short))}
    function, arrays = calls[name]
    specs = tuple(PartitionSpec(None, "sp") if x.ndim == 4 else None for x in arrays)

    def graded(**placed):
        def loss(arrays):
            output, state = function(*arrays, return_state=True, **placed)
            return jnp.sum(output**2) + jnp.sum(state**2)

        return jax.jit(jax.value_and_grad(loss))(arrays)

    got, want = graded(mesh=mesh, in_specs=specs, out_specs=(specs[0], None)), graded()
    jax.tree.map(lambda g, w: np.testing.assert_allclose(g, w, rtol=1e-4, atol=1e-4), got, want)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: rwkv4(U[0], U[0], R[:, :, 0], R[:, :3, 0]), r"v: got shape \(2, 3, 8\), wants \[B=2, T=11, C=8\]"),
        (lambda: rwkv6(R, K, V, W, U[:1]), r"u: got shape \(1, 8\), wants \[H=2, K=8\]"),
        (lambda: rwkv6(R, K, V, W[:, :3], U), r"w: got shape \(2, 3, 2, 8\), wants \[B=2, T=11, H=2, K=8\]"),
        (lambda: rwkv6(R, K.astype(jnp.bfloat16), V, W, U), "k: got dtype bfloat16, wants r's float32"),
        (lambda: rwkv7(R, W, K, V, R[..., :4], R), r"a: got shape \(2, 11, 2, 4\), wants \[B=2, T=11, H=2, K=8\]"),
        (lambda: rwkv7(R, W, K, V, R, R, initial_state=V), "initial_state: got shape"),
        (lambda: rwkv7_mul(R, W, K, V, None, R), r"kk: got None, wants \[B, T, H, K\]"),
        (lambda: rwkv7(R, W, K, V, R, R, cu_seqlens=np.array([0, 11])), "cu_seqlens: got a value with 2 rows"),
    ],
)
def test_wrong_calls_name_the_argument(call, message):
    with pytest.raises(ValueError, match=message):
        call()
