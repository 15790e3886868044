"""Operations that NumPy computes in place of a program of JAX: they give JAX's bits, and nothing is compiled."""

import jax
import jax.numpy as jnp
import numpy as np
from jax._src import compiler
from suite import operations

OPERATIONS = {
    "numbers": lambda x, i, m: [x + 1, x * x, x - 0.5, x / x, -x, jnp.abs(x), jnp.square(x), jnp.maximum(x, 0), x > 0],
    "integers": lambda x, i, m: [i + i, i * 3, i - 1, i == 2, ~i, i & 6, i.sum(), i.max(axis=1), jnp.minimum(i, 2)],
    "masks": lambda x, i, m: [~m, m & m, m | (i > 3), m.all(), m.any(axis=0), jnp.where(m, x, 0), jnp.where(m, i, -i)],
    "dtypes": lambda x, i, m: [x.astype("bfloat16"), x.astype("int32"), i.astype("float32"), m.astype("int8")],
    "parts": lambda x, i, m: [x[1], x[:, 2], x[1:, ::2], x[::-1], x[:, None], *jnp.split(x, 2, 1)],
    "shapes": lambda x, i, m: [x.T, x.reshape(4, 3), jnp.broadcast_to(x, (2, 3, 4)), jnp.tile(x, 2), x.swapaxes(0, 1)],
    "nested": lambda x, i, m: [jnp.clip(i, -1, 2), jnp.clip(x, 0, 1), jnp.roll(i, 1), jnp.tril(x), jnp.eye(3)],
    "joined": lambda x, i, m: [jnp.stack([x, x], 1), jnp.concatenate([i, i]), jnp.pad(x, ((1, 2), (0, 0)))],
    "weak": lambda x, i, m: [jnp.asarray(2.0) * x, jnp.multiply(2, 3), jnp.full((2, 3), 1.5)],
}


def operands():
    x = np.random.default_rng(0).normal(size=(3, 4)).astype(np.float32)
    i = np.arange(12, dtype=np.int32).reshape(3, 4) - 3
    return [jax.device_put(value) for value in (x, i, i > 2)]


def told(values):
    return [(x.dtype, x.shape, x.weak_type, x.committed, np.asarray(x).tobytes()) for x in values]


def test_results_are_those_of_a_program():
    """Whose name is not that of a function of JAX, so that JAX compiles it."""
    compiled = jax.jit(lambda *given: [make(*given) for make in OPERATIONS.values()])(*operands())
    for kind, make, want in zip(OPERATIONS, OPERATIONS.values(), compiled, strict=True):
        assert told(make(*operands())) == told(want), kind


def test_operations_are_not_compiled(monkeypatch):
    def fail(*args, **kwargs):
        raise AssertionError("compiled")

    x, mask = jax.device_put(np.ones(13, np.float32)), jax.device_put(np.arange(13) > 2)
    monkeypatch.setattr(compiler, "compile_or_get_cached", fail)
    found = [x[2] * 3 + 1, jnp.where(mask, x, 2), x.astype("bfloat16"), jnp.concatenate([x, x, x])]
    assert [len(np.ravel(each)) for each in found] == [1, 13, 13, 39]


def test_subnormal_and_committed_operands_are_left_to_jax():
    call = operations._computed_by_numpy(lambda *args, **params: "left to JAX")
    params = _params_of(jax.lax.mul, np.float32(1), np.float32(1))
    assert call(np.float32(2), np.float32(3), **params)[0] == [6]
    assert call(np.float32(1e-30), np.float32(1e-9), **params) == "left to JAX"
    assert call(jax.device_put(np.float32(2), jax.devices()[0]), np.float32(3), **params) == "left to JAX"


def _params_of(function, *args):
    [equation] = jax.make_jaxpr(jax.jit(function))(*args).eqns
    return equation.params
