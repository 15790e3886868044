"""Delta rules whose programs hold all key channels of a state, and what they launch."""

import jax
import jax.numpy as jnp

from ejkernel.families.linear_recurrence import LinearRecurrence
from ejkernel.ops.device import target_device
from ejkernel.types.pullback import Pullback, tracing_differentiated_call
from ejkernel_triton import launch
from ejkernel_triton.linear_recurrence.delta import backward as delta_backward
from ejkernel_triton.linear_recurrence.delta import config as delta_config
from ejkernel_triton.linear_recurrence.delta import forward as delta_forward

GATES = ("none", "heads", "channels")


def delta_record(gates, dtype, size=256, rows=4, tokens=1024):
    """A call with gates of a kind, and an initial state."""

    def array(*sizes, of=jnp.float32):
        return jax.ShapeDtypeStruct((rows, tokens, *sizes), of)

    query, decay = array(16, size, of=dtype), {"none": None, "heads": array(16, 1), "channels": array(16, size)}
    state = jax.ShapeDtypeStruct((rows, 16, size, size), jnp.float32)
    return LinearRecurrence(
        query=query,
        key=query,
        value=query,
        softmax_scale=0.1,
        decay=decay[gates],
        beta=array(16),
        initial_state=state,
    )


def delta_launches(record, device, chosen=None):
    """What both passes of a delta rule launch."""
    names = ("query", "key", "value", "decay", "beta", "initial_state")
    wanted = frozenset(name for name in names if getattr(record, name) is not None)
    chosen = chosen or delta_config.heuristic(record, device, "forward")

    def run(record):
        with tracing_differentiated_call():
            output, residuals, kept = delta_forward.forward(record, chosen)
        saved = Pullback(
            record=record,
            residuals=residuals,
            output=output,
            cotangent=output,
            grad_fields=wanted,
            private_residuals=kept,
        )
        return delta_backward.backward(saved, chosen)

    with target_device(device), launch.collect_launches() as calls:
        jax.eval_shape(lambda record: run(record), record)
    return calls
