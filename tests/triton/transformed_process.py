"""Transformed calls of the interpreted Triton kernels, against XLA; run by `test_interpreted.py`."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from ejkernel.modules import flash_attention

SPEC = PartitionSpec("rows", None, "heads", None)


def gradients(platform, **sharded):
    def loss(query, key, value, sinks):
        options = {"causal": True, "dropout_prob": 0.2, "dropout_seed": 5, "platform": platform}
        output = flash_attention(query, key, value, None, None, None, sinks, **options, **sharded)
        return (output * output).sum()

    return jax.jit(jax.value_and_grad(loss, (0, 1, 2, 3)))


def main():
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = ((2, 48, 4, 16), (2, 48, 2, 16), (2, 48, 2, 16))
    query, key, value = (jax.random.normal(k, shape) for k, shape in zip(keys, shapes, strict=True))
    sinks = jnp.ones((4, 1))
    mesh = Mesh(np.array(jax.devices()).reshape(2, 2), ("rows", "heads"))
    want = gradients("xla")(query, key, value, sinks)
    got = gradients("triton", mesh=mesh, in_specs=(SPEC, SPEC, SPEC), out_specs=SPEC)(query, key, value, sinks)
    jax.tree.map(lambda g, w: np.testing.assert_allclose(g, w, rtol=2e-5, atol=2e-5), got, want)

    def slope(platform, wrap):
        call = wrap(lambda query: flash_attention(query, key, value, platform=platform, causal=True))
        return jax.jit(jax.grad(lambda query: (call(query) ** 2).sum()))(query)

    np.testing.assert_allclose(slope("triton", jax.checkpoint), slope("xla", lambda f: f), rtol=2e-5, atol=2e-5)


if __name__ == "__main__":
    main()
