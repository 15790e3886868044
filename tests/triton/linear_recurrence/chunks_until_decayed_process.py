"""Segments in Triton's interpreter whose states vanish inside of them, one head's only: both passes by the formula."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from gradients_of import gradients_of

from ejkernel.families.linear_recurrence import LinearRecurrence, reference
from ejkernel.ops.device import current_device
from ejkernel.types.pullback import tracing_differentiated_call
from ejkernel_triton.linear_recurrence.chunked import backward as chunked_backward
from ejkernel_triton.linear_recurrence.chunked import config as chunked_config
from ejkernel_triton.linear_recurrence.chunked import forward as chunked_forward
from ejkernel_triton.linear_recurrence.delta import backward as delta_backward
from ejkernel_triton.linear_recurrence.delta import config as delta_config
from ejkernel_triton.linear_recurrence.delta import forward as delta_forward
from ejkernel_triton.linear_recurrence.segments import forward as segments_forward

TOKENS = 250
DIFFERENTIABLE = ("query", "key", "value", "decay", "initial_state", "beta")


def record_of(decay, beta):
    """A call whose first head forgets and whose second does not."""
    random = np.random.default_rng(0)
    query, key, value = (jnp.asarray(random.normal(size=(1, TOKENS, 2, 16)), jnp.float32) for _ in range(3))
    key /= jnp.linalg.norm(key, axis=-1, keepdims=True)
    initial = jnp.asarray(random.normal(size=(1, 2, 16, 16)), jnp.float32)
    return LinearRecurrence(
        query=query, key=key, value=value, softmax_scale=0.3, decay=decay, initial_state=initial, beta=beta
    )


def checked(record, forward, backward, heuristic):
    """Compares output, state and gradients with the formula's."""
    names = [name for name in DIFFERENTIABLE if getattr(record, name) is not None]
    fields = {name: getattr(record, name) for name in names}
    want, pull = jax.vjp(lambda fields: reference(dataclasses.replace(record, **fields))[0], fields)
    cotangent = jax.tree.map(lambda x: jnp.sin(jnp.arange(x.size, dtype=x.dtype)).reshape(x.shape), want)
    chosen = heuristic(record, current_device(), "both")
    chosen = dataclasses.replace(chosen, chunk=16, backward_chunk=16, segments=4)

    @jax.jit
    def run(record):
        with tracing_differentiated_call():
            results = forward(record, chosen)
        return results[0], gradients_of(record, results, backward, chosen, names, cotangent)

    output, gradients = run(record)
    wanted = {"output": want[0], "state": want[1], **pull(cotangent)[0]}
    for name, array in {"output": output[0], "state": output[1], **gradients}.items():
        off = jnp.linalg.norm(array - wanted[name]) / jnp.linalg.norm(wanted[name])
        assert off < 1e-5, (name, float(off))


ramp = jnp.linspace(0.5, 1.5, TOKENS)[None, :, None, None]
by_head = jnp.array([-4.0, -0.01])[None, None, :, None]
beta = jnp.full((1, TOKENS, 2), 0.5)
found = {}


def record_chunks_until_decayed(call, w, plan, original=segments_forward.find_chunks_until_decayed):
    """Records after how many chunks states have decayed, by direction."""
    chunks = original(call, w, plan)
    jax.debug.callback(lambda x: found.setdefault(plan.reverse, np.asarray(x)), chunks)
    return chunks


# Both passes of the delta rule import it by name.
delta_forward.find_chunks_until_decayed = delta_backward.find_chunks_until_decayed = record_chunks_until_decayed
checked(record_of(ramp * by_head, beta), delta_forward.forward, delta_backward.backward, delta_config.heuristic)
jax.effects_barrier()
# Segments of 4 chunks: the first head's states pass none of them, and the second's all. No gradient passes the first.
assert (found[False][0, :, 0] <= 4).all(), found
assert (found[False][0, :, 1] > 4).all(), found
assert (found[True][0, 1:, 0] <= 4).all(), found
assert (found[True][0, 1:, 1] > 4).all(), found
assert (found[True][0, 0] == 0).all(), found
checked(record_of(by_head, None), chunked_forward.forward, chunked_backward.backward, chunked_config.heuristic)
checked(
    record_of(ramp * by_head * jnp.linspace(0.5, 1.0, 16), None),
    chunked_forward.forward,
    chunked_backward.backward,
    chunked_config.heuristic,
)
