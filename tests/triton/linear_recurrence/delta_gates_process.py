"""KDA in Triton's interpreter against a loop in float64, with gates from mild ones down to -inf."""

import jax
import jax.numpy as jnp
import numpy as np
from log_gates import STRENGTHS, gates_of

from ejkernel.modules import kernel_delta_attention

TOKENS, HEADS, SIZE = 72, 2, 16


def loop(query, key, value, decay, beta):
    """Outputs and final state, token by token in float64."""
    query, key, value, decay, beta = (np.asarray(x, np.float64) for x in (query, key, value, decay, beta))
    state, outputs = np.zeros((1, HEADS, SIZE, SIZE)), []
    for t in range(TOKENS):
        state = state * np.exp(decay[:, t])[..., None]
        write = beta[:, t, :, None] * (value[:, t] - np.einsum("bhkv,bhk->bhv", state, key[:, t]))
        state = state + key[:, t][..., None] * write[:, :, None]
        outputs.append(np.einsum("bhkv,bhk->bhv", state, query[:, t]))
    return np.stack(outputs, 1), state


def gradients(arrays, cotangent, platform, dtype):
    """Gradients of a weighted sum of outputs and of the final state's square."""

    def loss(query, key, value, decay, beta):
        tokens = (x.astype(dtype) for x in (query, key, value))
        output, state = call(*tokens, decay, beta, platform)
        return jnp.sum(output.astype(jnp.float32) * cotangent) + jnp.sum(state**2)

    return jax.jit(jax.grad(loss, (0, 1, 2, 3, 4)))(*arrays)


def call(query, key, value, decay, beta, platform):
    """KDA as a layer calls it that has normalised its keys."""
    options = {"use_qk_l2norm": False, "softmax_scale": 1.0, "return_state": True, "platform": platform}
    return kernel_delta_attention(query, key, value, beta, decay, **options)


def error(x, y):
    """The largest error relative to the largest number."""
    return np.abs(np.asarray(x, np.float64) - np.asarray(y, np.float64)).max() / np.abs(np.asarray(y)).max()


def check(strength, dtype, most):
    """Compares outputs and the state with the loop, and gradients with XLA's in float32."""
    keys = jax.random.split(jax.random.key(0), 6)
    query, key, value = (jax.random.normal(k, (1, TOKENS, HEADS, SIZE)) for k in keys[:3])
    key = key / jnp.linalg.norm(key, axis=-1, keepdims=True)
    tokens = tuple(x.astype(dtype) for x in (query, key, value))
    decay = gates_of(strength, keys[3], (1, TOKENS, HEADS, SIZE))
    beta = jax.nn.sigmoid(jax.random.normal(keys[4], (1, TOKENS, HEADS)))
    output, state = jax.jit(lambda *x: call(*x, "triton"))(*tokens, decay, beta)
    for x, y in zip((output, state), loop(*tokens, decay, beta), strict=True):
        assert error(x, y) < most, (strength, dtype, error(x, y))
    arrays, cotangent = (
        (*(x.astype(jnp.float32) for x in tokens), decay, beta),
        jax.random.normal(keys[5], output.shape),
    )
    named = ("query", "key", "value", "decay", "beta")
    got, wanted = gradients(arrays, cotangent, "triton", dtype), gradients(arrays, cotangent, "xla", jnp.float32)
    for name, x, y in zip(named, got, wanted, strict=True):
        assert error(x, y) < most, (strength, dtype, name, error(x, y))
        print(strength, np.dtype(dtype).name, name, f"{error(x, y):.1e}")


for strength in STRENGTHS:
    check(strength, jnp.float32, 2e-6)
check("-inf", jnp.float16, 2e-3)
