"""What RWKV's operations have in common with others, and what they refuse."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import rwkv_loop

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


def test_decays_of_any_strength_have_outputs_and_gradients():
    """A third of the tokens forgets everything, and the others leave exp(-300), which is 0."""
    direction = K / jnp.linalg.norm(K, axis=-1, keepdims=True)
    decay = jnp.where(jnp.arange(11)[:, None, None] % 3 == 0, -jnp.inf, -300.0) * jnp.ones_like(W)
    rate = jnp.full_like(R, 0.5)
    want, _ = rwkv_loop.rwkv7_mul(*(np.asarray(x, np.float64) for x in (R, decay, K, V, direction, rate)))
    np.testing.assert_allclose(rwkv7_mul(R, decay, K, V, direction, rate), want, rtol=1e-4, atol=1e-5)

    def loss(arguments, w, v):
        output = arguments(R, w, K, v, direction, rate)
        return jnp.sum(output**2)

    def one_by_one(r, w, k, v, kk, a):
        def token(state, tokens):
            r, w, k, v, kk, a = tokens
            removed = jnp.einsum("bhk,bhkv->bhv", kk, state)
            state = jnp.exp(w)[..., None] * state - (kk * a)[..., None] * removed[..., None, :]
            state = state + k[..., None] * v[..., None, :]
            return state, 8**-0.5 * jnp.einsum("bhk,bhkv->bhv", r, state)

        _, outputs = jax.lax.scan(token, jnp.zeros((2, 2, 8, 8)), [jnp.moveaxis(x, 1, 0) for x in (r, w, k, v, kk, a)])
        return jnp.moveaxis(outputs, 0, 1)

    got, want = (jax.grad(loss, (1, 2))(call, decay, V) for call in (rwkv7_mul, one_by_one))
    jax.tree.map(lambda g, w: np.testing.assert_allclose(g, w, rtol=1e-4, atol=1e-4), got, want)


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("operation", [rwkv6, rwkv7, rwkv7_mul])
def test_nan_in_padding_reaches_no_gradient(operation, reverse):
    arrays = {"r": R, "w": W, "k": K, "v": V}
    further = {rwkv6: {}, rwkv7: {"a": K, "b": -K}, rwkv7_mul: {"kk": K, "a": jax.nn.sigmoid(R)}}
    arrays |= further[operation]
    packed = {name: x[:1] for name, x in arrays.items()}
    cu_seqlens = jnp.array([0, 5, 9])
    is_padding = (jnp.arange(11) >= 9)[None, :, None, None]
    shared = {"u": U} if operation is rwkv6 else {}

    def loss(packed, shared):
        output = operation(**packed, **shared, cu_seqlens=cu_seqlens, reverse=reverse)
        return jnp.sum(jnp.where(is_padding, 0, jnp.sin(output)))

    filled = {name: jnp.where(is_padding, jnp.nan, x) for name, x in packed.items()}
    want = jax.grad(loss, argnums=(0, 1))({name: jnp.where(is_padding, 0, x) for name, x in packed.items()}, shared)
    got = jax.grad(loss, argnums=(0, 1))(filled, shared)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6), got, want)


def test_rwkv4_of_keys_of_100_does_not_overflow():
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


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: rwkv4(U[0], U[0], R[:, :, 0], R[:, :3, 0]), r"v: got shape \(2, 3, 8\), wants \[B=2, T=11, C=8\]"),
        (lambda: rwkv4(U[0], U[0], R[:, :0, 0], R[:, :0, 0]), r"k: got shape \(2, 0, 8\), wants T of at least 1"),
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
