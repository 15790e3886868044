"""The delta rule's gradients in bfloat16 over several chunks, in Triton's interpreter."""

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.modules import gated_delta_rule, kernel_delta_attention
from ejkernel_triton import _compat


def inputs(channels):
    """Queries, keys and values of five chunks, their gates and betas."""
    keys, tokens, size = jax.random.split(jax.random.key(0), 5), 72, 16
    query, key, value = (jax.random.normal(k, (1, tokens, 1, size)) for k in keys[:3])
    key = key / jnp.linalg.norm(key, axis=-1, keepdims=True)
    decay = -jax.random.uniform(keys[3], (1, tokens, 1, size) if channels else (1, tokens, 1), maxval=0.1)
    beta = jax.random.uniform(keys[4], (1, tokens, 1), minval=0.5)
    return tuple(x.astype(jnp.bfloat16) for x in (query, key, value)), decay, beta


def gradients(channels, platform, dtype):
    """Gradients of the sum of squares of the outputs and the final state, in float32."""
    tokens, decay, beta = inputs(channels)
    tokens = tuple(x.astype(dtype) for x in tokens)

    def loss(query, key, value, decay, beta):
        options = {"return_state": True, "platform": platform}
        if channels:
            output, state = kernel_delta_attention(query, key, value, beta, decay, **options)
        else:
            output, state = gated_delta_rule(query, key, value, beta, decay, **options)
        return jnp.sum(output.astype(jnp.float32) ** 2) + jnp.sum(state**2)

    made = jax.jit(jax.grad(loss, (0, 1, 2, 3, 4)))(*tokens, decay, beta)
    return [np.asarray(x, np.float32) for x in made]


for channels in (False, True):
    got = gradients(channels, "triton", jnp.bfloat16)
    wanted = gradients(channels, "xla", jnp.float32)
    for name, x, y in zip(("query", "key", "value", "decay", "beta"), got, wanted, strict=True):
        error = np.abs(x - y).max() / np.abs(y).max()
        print(f"channels={channels} {name}: {error:.4f}")
        assert error < 0.06, name
print("same")

interpreter = _compat._interpreter_module()
tile = interpreter.TensorHandle(np.ones(16, np.uint16), interpreter.tl.bfloat16)
try:
    interpreter.interpreter_builder.create_fneg(tile)
except TypeError as error:
    print(error)
