"""Kernels of the selective scan whose packed sequences have a state each, for states in slots too.

    @with_states
    def forward(record, config): ...             # never sees `state_slots`

Around such a kernel, states are read out of the slots before it and stored into them after it.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.families.selective_scan.record import SelectiveScan
from ejkernel.planning import slots
from ejkernel.types.pullback import Pullback

PACKED_STATE_FIELDS = frozenset({"cu_seqlens", "state_slots"})
"""Optional fields that a kernel of packed sequences honours with the decorators."""

ForwardFunction = Callable[[SelectiveScan, Any], Any]
BackwardFunction = Callable[[Pullback, Any], dict[str, jax.Array]]


def sequences(record: SelectiveScan) -> int:
    """Returns packed sequences, or rows: what has a state of its own."""
    return record.x.shape[0] if record.cu_seqlens is None else record.cu_seqlens.shape[0] - 1


def forward_with_slot_states(forward: ForwardFunction) -> ForwardFunction:
    """Returns the forward function for states in slots, of one whose packed sequences have a state each."""

    @functools.wraps(forward)
    def run(record: SelectiveScan, config: Any) -> Any:
        held, indices, starts = record.initial_state, record.state_slots, record.cu_seqlens
        if held is None or indices is None or starts is None:
            return forward(record, config)
        (output, final), *rest = forward(with_plain_states(record), config)
        return (output, slots.write_slots(held, indices, starts, final)), *rest

    return run


def backward_with_slot_states(backward: BackwardFunction) -> BackwardFunction:
    """Returns the backward function for states in slots, of one whose packed sequences have a state each."""

    @functools.wraps(backward)
    def run(pullback: Pullback, config: Any) -> dict[str, jax.Array]:
        record: SelectiveScan = pullback.record
        held, indices, starts = record.initial_state, record.state_slots, record.cu_seqlens
        if held is None or indices is None or starts is None:
            return backward(pullback, config)
        outputs, cotangent = pullback.cotangent
        dtype = jnp.promote_types(record.x.dtype, jnp.float32)
        final = jnp.zeros((starts.shape[0] - 1, *held.shape[1:]), dtype)
        kept, final = slots.gradients_of_write(held, indices, starts, final, cotangent)
        inner = dataclasses.replace(pullback, record=with_plain_states(record), output=None, cotangent=(outputs, final))
        gradients = backward(inner, config)
        if "initial_state" in gradients:
            read = slots.gradient_of_read(held, indices, starts, gradients["initial_state"])
            gradients["initial_state"] = read + kept
        return gradients

    return run


def with_plain_states(record: SelectiveScan) -> SelectiveScan:
    """Returns the record with a state for every packed sequence, read out of the slots; as it is without slots."""
    held, indices, starts = record.initial_state, record.state_slots, record.cu_seqlens
    if held is None or indices is None or starts is None:
        return record
    return dataclasses.replace(record, initial_state=slots.read_slots(held, indices, starts), state_slots=None)
