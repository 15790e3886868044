"""Recurrences with a low-rank term in Triton's interpreter, with weak gates and with those down to -inf."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.families.linear_recurrence import LinearRecurrence, reference
from ejkernel.ops.device import current_device
from ejkernel.types.pullback import Pullback
from ejkernel_triton.linear_recurrence.low_rank.backward import backward
from ejkernel_triton.linear_recurrence.low_rank.config import heuristic
from ejkernel_triton.linear_recurrence.low_rank.forward import forward

FIELDS = ("query", "key", "value", "decay", "low_rank_write", "low_rank_read", "initial_state")


def record_of(gates):
    """A call of three chunks, whose last one is not full, and two heads that share keys and values."""
    keys = jax.random.split(jax.random.key(0), 8)
    query, key, value = (
        jax.random.normal(k, (1, 40, n, d)) for k, n, d in zip(keys, (2, 1, 1), (16, 16, 8), strict=False)
    )
    decay, direction, strength = jax.random.normal(keys[3], (3, 1, 40, 2, 16))
    decay = -jnp.exp(decay)
    if gates == "harsh":
        decay = jnp.where(jax.random.uniform(keys[4], decay.shape) < 0.1, -jnp.inf, 40 * decay)
    direction = direction / jnp.linalg.norm(direction, axis=-1, keepdims=True)
    return LinearRecurrence(
        query=query,
        key=key,
        value=value,
        softmax_scale=0.5,
        decay=decay,
        low_rank_write=direction * jax.nn.sigmoid(strength),
        low_rank_read=-direction,
        initial_state=jax.random.normal(keys[5], (1, 2, 16, 8)),
    )


def wanted_gradients(record, cotangents):
    def loss(arrays):
        results, _ = reference(dataclasses.replace(record, **arrays))
        return sum(jnp.vdot(x, y) for x, y in zip(results, cotangents, strict=True))

    return jax.jit(jax.grad(loss))({name: getattr(record, name) for name in FIELDS})


for gates in ("weak", "harsh"):
    record = record_of(gates)
    chosen = heuristic(record, current_device(), "forward")
    expected, _ = reference(record)
    results, *_ = jax.jit(lambda record, chosen=chosen: forward(record, chosen))(record)
    for got, want in zip(results, expected, strict=True):
        np.testing.assert_allclose(got, want, atol=2e-6, rtol=2e-6)
    cotangents = tuple(jax.random.normal(jax.random.key(1), x.shape) for x in expected)
    # Without residuals, so that the backward pass runs the forward kernels again, and stores what they compute.
    pullback = Pullback(record=record, residuals=(), output=None, cotangent=cotangents, grad_fields=frozenset(FIELDS))
    gradients = jax.jit(lambda pullback, chosen=chosen: backward(pullback, chosen))(pullback)
    for name, want in wanted_gradients(record, cotangents).items():
        # Terms of the size of the other gradients cancel in that of strong gates.
        tolerance = 5e-6 * max(1.0, float(jnp.abs(want).max()))
        np.testing.assert_allclose(gradients[name], want, atol=tolerance, rtol=0, err_msg=name)
print("same")
