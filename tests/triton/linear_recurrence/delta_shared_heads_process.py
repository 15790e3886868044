"""The delta rule's gradients in Triton's interpreter, with groups of heads that share queries and keys."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from gradients_of import gradients_of

from ejkernel.families.linear_recurrence import LinearRecurrence, reference
from ejkernel.ops.device import current_device
from ejkernel_triton.linear_recurrence.delta import config
from ejkernel_triton.linear_recurrence.delta.backward import backward
from ejkernel_triton.linear_recurrence.delta.forward import forward

TOKENS, SIZE = 21, 16
FIELDS = ("query", "key", "value", "decay", "beta")


def make_record(heads, query_heads, key_heads):
    """Unit keys and mild gates for two chunks of tokens, the second partial."""
    keys = jax.random.split(jax.random.key(0), 5)
    sizes = (query_heads, key_heads, heads)
    query, key, value = (jax.random.normal(k, (1, TOKENS, n, SIZE)) for k, n in zip(keys, sizes, strict=False))
    return LinearRecurrence(
        query=query,
        key=key / jnp.linalg.norm(key, axis=-1, keepdims=True),
        value=value,
        softmax_scale=0.5,
        decay=-jax.random.uniform(keys[3], (1, TOKENS, heads, 1), maxval=0.1),
        beta=jax.random.uniform(keys[4], (1, TOKENS, heads), minval=0.5),
    )


def check(*sizes):
    """Compares the gradients with those of the differentiated reference."""
    record = make_record(*sizes)
    chosen = config.heuristic(record, current_device(), "both")
    values = {name: getattr(record, name) for name in FIELDS}
    output, pull = jax.vjp(lambda values: reference(dataclasses.replace(record, **values))[0][0], values)
    cotangent = jax.random.normal(jax.random.key(1), output.shape)

    def run(record):
        results = forward(record, chosen)
        _, state = results[0]
        both = (cotangent, jnp.zeros_like(state))
        return gradients_of(record, results, backward, chosen, FIELDS, both)

    got, expected = jax.jit(run)(record), pull(cotangent)[0]
    for name in FIELDS:
        limit = 1e-5 * np.abs(expected[name]).max()
        np.testing.assert_allclose(got[name], expected[name], rtol=0, atol=limit, err_msg=f"{sizes}, {name}")


check(8, 4, 2)
check(8, 2, 1)
