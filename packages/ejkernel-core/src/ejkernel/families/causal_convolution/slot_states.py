"""Implementations of the causal convolution whose packed sequences have a state each, for states in slots too.

    @forward_with_slot_states
    def forward(record, config): ...             # never gets `state_slots`

Around such an implementation, states are read out of the slots before it and stored into them after it.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.families.causal_convolution.record import CausalConvolution
from ejkernel.planning import slots
from ejkernel.types.pullback import Pullback

ForwardFunction = Callable[[CausalConvolution, Any], Any]
BackwardFunction = Callable[[Pullback, Any], dict[str, jax.Array]]


def with_plain_states(record: CausalConvolution) -> CausalConvolution:
    """Returns the record with a state for every packed sequence, read out of the slots; unchanged without slots."""
    held, indices, starts = record.sequence_state, record.state_slots, record.cu_seqlens
    if held is None or indices is None or starts is None:
        return record
    return dataclasses.replace(record, sequence_state=slots.read_slots(held, indices, starts), state_slots=None)


def with_stored_states(record: CausalConvolution, final_states: jax.Array) -> jax.Array:
    """Returns the slots of a record with the final states of its sequences, or these themselves without slots."""
    held, indices, starts = record.sequence_state, record.state_slots, record.cu_seqlens
    if held is None or indices is None or starts is None:
        return final_states
    return slots.write_slots(held, indices, starts, final_states)


def forward_with_slot_states(forward: ForwardFunction) -> ForwardFunction:
    """Returns the forward function for states in slots, of one whose packed sequences have a state each."""

    @functools.wraps(forward)
    def run(record: CausalConvolution, config: Any) -> Any:
        (output, final), *rest = forward(with_plain_states(record), config)
        return (output, with_stored_states(record, final)), *rest

    return run


def backward_with_slot_states(backward: BackwardFunction) -> BackwardFunction:
    """Returns the backward function for states in slots, of one whose packed sequences have a state each."""

    @functools.wraps(backward)
    def run(pullback: Pullback, config: Any) -> dict[str, jax.Array]:
        record: CausalConvolution = pullback.record
        held, indices, starts = record.sequence_state, record.state_slots, record.cu_seqlens
        if held is None or indices is None or starts is None:
            return backward(pullback, config)
        outputs, cotangent = pullback.cotangent
        final = jnp.zeros((starts.shape[0] - 1, *held.shape[1:]), record.x.dtype)
        kept, final = slots.gradients_of_write(held, indices, starts, final, cotangent)
        inner = dataclasses.replace(pullback, record=with_plain_states(record), output=None, cotangent=(outputs, final))
        gradients = backward(inner, config)
        if "sequence_state" in gradients:
            read = slots.gradient_of_read(held, indices, starts, gradients["sequence_state"])
            gradients["sequence_state"] = read + kept
        return gradients

    return run
