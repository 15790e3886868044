"""The gradients of the causal convolution in XLA."""

import dataclasses
from typing import Any

import jax

from ejkernel.families.causal_convolution import CausalConvolution, states
from ejkernel.families.causal_convolution.final_states import add_state_gradients
from ejkernel.families.causal_convolution.slot_states import backward_with_slot_states
from ejkernel.types.pullback import Pullback
from ejkernel_xla.causal_convolution.forward import activated_output


@backward_with_slot_states
def backward(pullback: Pullback, config: Any) -> dict[str, jax.Array]:
    """Returns gradients of the requested fields of a record.

    Args:
        pullback: Record, cotangents of output and final states, and the requested names.
        config: Not read.

    Returns:
        Each requested gradient, in its field's shape and dtype.
    """
    record: CausalConvolution = pullback.record
    outputs, final = pullback.cotangent
    state = "initial_state" if record.cu_seqlens is None else "sequence_state"
    fields = {name: getattr(record, name) for name in ("x", "weight", "bias") if getattr(record, name) is not None}
    fields[state] = states(record)

    def output(fields: dict[str, jax.Array]) -> jax.Array:
        return activated_output(dataclasses.replace(record, **fields))

    # The transposed views give the same loop in reverse. The sums, which the derivative of the activation needs, are
    # recomputed.
    (gradients,) = jax.vjp(output, fields)[1](outputs)
    dx, dstate = add_state_gradients(record, gradients["x"], gradients[state], final)
    gradients |= {"x": dx, state: dstate}
    return {name: gradients[name].astype(getattr(record, name).dtype) for name in sorted(pullback.grad_fields)}
