"""Tokens split over two devices, whose kernels are interpreted Triton, against XLA on one; run by
`test_linear_recurrence.py`.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from ejkernel.modules import gated_linear_attention, kernel_delta_attention
from ejkernel.ops import explain

T = 64
LENGTHS = jnp.array([0, 20, 50, 64], jnp.int32)
CASES = {
    "gates": (gated_linear_attention, ("query", "key", "value", "g", "initial_state"), {}),
    "delta": (kernel_delta_attention, ("query", "key", "value", "beta", "decay"), {"cu_seqlens": LENGTHS}),
}


def arrays():
    """Returns the arrays of both calls by name."""
    rng = np.random.default_rng(0)
    values = {name: rng.normal(size=(1, T, 1, 16)) for name in ("query", "key", "value")}
    gate = -np.abs(rng.normal(size=(1, T, 1, 16))) / 4
    values |= {"g": gate, "decay": gate, "beta": rng.uniform(size=(1, T, 1))}
    values["initial_state"] = rng.normal(size=(1, 1, 16, 16))
    return {name: jnp.asarray(x, jnp.float32) for name, x in values.items()}


def graded(call, inputs):
    """Returns output, final states and gradients of all arrays."""
    (output, states), pull = jax.vjp(lambda inputs: call(**inputs, return_state=True), inputs)
    weights = (jnp.cos(jnp.arange(x.size, dtype=jnp.float32)).reshape(x.shape) for x in (output, states))
    return output, states, pull(tuple(weights))[0]


def main():
    mesh = jax.make_mesh((2,), ("sp",), (AxisType.Auto,), devices=jax.devices()[:2])
    tokens, every = P(None, "sp"), arrays()
    for name, (function, names, options) in CASES.items():
        inputs = {x: every[x] for x in names}
        specs = tuple(tokens if every[x].shape[1] == T else P() for x in names if x != "initial_state")
        placed = {"mesh": mesh, "in_specs": specs, "out_specs": (tokens, P()), "platform": "triton"}
        decision = explain(function, **inputs, **placed, **options, return_state=True)
        assert decision.backward.implementation.platform == "triton", decision
        got = jax.jit(functools.partial(graded, functools.partial(function, **placed, **options)))(inputs)
        want = jax.jit(functools.partial(graded, functools.partial(function, platform="xla", **options)))(inputs)
        for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-3, atol=1e-3, err_msg=name)


if __name__ == "__main__":
    main()
