"""The delta rule in Triton's interpreter for chunks of 32 tokens whose keys are all the same."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.families.linear_recurrence import LinearRecurrence, reference
from ejkernel.ops.device import current_device
from ejkernel_triton.linear_recurrence.delta import config as delta_config
from ejkernel_triton.linear_recurrence.delta.forward import forward

keys = jax.random.split(jax.random.key(0), 3)
key = jnp.broadcast_to(jax.random.normal(keys[0], (1, 1, 1, 16)), (1, 40, 1, 16))
value = jax.random.normal(keys[1], (1, 40, 1, 16))
beta = jax.random.uniform(keys[2], (1, 40, 1), minval=0.8)
record = LinearRecurrence(
    query=key,
    key=key / jnp.linalg.norm(key, axis=-1, keepdims=True),
    value=value,
    softmax_scale=1.0,
    beta=beta,
    decay=jnp.zeros((1, 40, 1, 1)),
)
(wanted, final), _ = reference(record)
for walk in (True, False):
    chosen = delta_config.heuristic(record, current_device(), "forward")
    chosen = dataclasses.replace(chosen, chunk=32, fused=walk)
    (output, state), *_ = jax.jit(lambda record, chosen=chosen: forward(record, chosen))(record)
    np.testing.assert_allclose(output, wanted, atol=1e-5)
    np.testing.assert_allclose(state, final, atol=1e-5)
