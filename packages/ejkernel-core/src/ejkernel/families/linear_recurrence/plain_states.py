"""Kernels of the linear recurrence that take states one way only: [B, H, K, V], or [N, H, K, V] of packed sequences.

    @forward_with_plain_states
    def forward(record, config): ...             # never sees slots nor transposed states

Around such a kernel, states are read out of the slots before it and stored into them after it: a state moves three
times, where a kernel that reads and writes slots itself moves it once.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.families.linear_recurrence import record as family
from ejkernel.families.linear_recurrence.record import LinearRecurrence
from ejkernel.types.pullback import Pullback

ForwardFunction = Callable[[LinearRecurrence, Any], Any]
BackwardFunction = Callable[[Pullback, Any], dict[str, jax.Array]]

STATE_LAYOUT_FIELDS = frozenset({"state_slots", "transposed_states"})
"""Optional fields that a kernel honours with the decorators."""


def forward_with_plain_states(forward: ForwardFunction) -> ForwardFunction:
    """Returns the forward function for records with slots or transposed states, of one for plain states."""

    @functools.wraps(forward)
    def run(record: LinearRecurrence, config: Any) -> Any:
        if not _has_rearranged_states(record):
            return forward(record, config)
        (read, final), *rest = forward(family.with_plain_states(record), config)
        return (read, family.to_recorded_state_layout(record, final)), *rest

    return run


def backward_with_plain_states(backward: BackwardFunction) -> BackwardFunction:
    """Returns the backward function for records with slots or transposed states, of one for plain states."""

    @functools.wraps(backward)
    def run(pullback: Pullback, config: Any) -> dict[str, jax.Array]:
        record: LinearRecurrence = pullback.record
        if not _has_rearranged_states(record):
            return backward(pullback, config)
        name = "initial_state" if record.cu_seqlens is None else "sequence_state"

        def record_with_plain_states(stored_states: jax.Array | None) -> LinearRecurrence:
            return family.with_plain_states(dataclasses.replace(record, **{name: stored_states}))

        def final_states_as_recorded(stored_states: jax.Array | None, final_states: jax.Array) -> jax.Array:
            return family.to_recorded_state_layout(dataclasses.replace(record, **{name: stored_states}), final_states)

        held, (read, final) = getattr(record, name), pullback.cotangent
        # Both functions are linear: their derivatives do not depend on the values, so XLA drops the values.
        _, pull_stored = jax.vjp(
            final_states_as_recorded, held, jnp.zeros(family.final_states_shape(record), family.accumulator(record))
        )
        kept, final = pull_stored(final)
        inner = dataclasses.replace(
            pullback, record=record_with_plain_states(held), output=None, cotangent=(read, final)
        )
        gradients = backward(inner, config)
        if name in pullback.grad_fields:
            _, pull_read = jax.vjp(lambda held: getattr(record_with_plain_states(held), name), held)
            gradients[name] = kept + pull_read(gradients[name])[0]
        return gradients

    return run


def _has_rearranged_states(record: LinearRecurrence) -> bool:
    """Returns whether a record's states are not as a kernel for plain ones takes them."""
    return record.transposed_states or family.slotted_states(record) is not None
