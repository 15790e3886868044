"""Calls with more value channels than the kernels of gradients are compiled for: a head becomes several, each with some
of its value channels, which share its query, key and gates.

    @forward_with_split_values
    def forward(record, config): ...             # sees at most 128 value channels where a backward pass follows

Columns of the state do not depend on each other, so outputs and gradients of values and states are those of the call,
and gradients of what the heads share add up.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.families.linear_recurrence import LinearRecurrence, num_state_heads
from ejkernel.families.linear_recurrence.plain_states import BackwardFunction, ForwardFunction
from ejkernel.types.pullback import Pullback, is_differentiated

VALUE_DIMS_WITH_GRADIENTS = (64, 128)
"""The value dimensions that the kernels of gradients are compiled for."""

SHARED_FIELDS = {"decay": 2, "beta": 2}
"""The head axis of each field that a head's parts share and kernels read per head of the call."""

STATE_FIELDS = ("initial_state", "sequence_state")


def gradient_value_reasons(record: LinearRecurrence) -> tuple[str, ...]:
    """Returns why the kernels of gradients cannot serve a record's values. Only heads with the delta rule are split."""
    values, heads, value_heads = record.value.shape[3], num_state_heads(record), record.value.shape[2]
    if values in VALUE_DIMS_WITH_GRADIENTS or (record.beta is not None and value_heads == heads):
        return ()
    shared = "" if value_heads == heads else f" of {value_heads} heads that {heads} share"
    wants = " and ".join(map(str, VALUE_DIMS_WITH_GRADIENTS))
    return (f"value: got head dimension {values}{shared}, the kernels of gradients want {wants}",)


def forward_with_split_values(forward: ForwardFunction) -> ForwardFunction:
    """Returns the forward function, for which heads are split if a backward pass follows."""

    @functools.wraps(forward)
    def run(record: LinearRecurrence, config: Any) -> Any:
        parts = _num_parts(record)
        if parts == 1 or not is_differentiated():
            return forward(record, config)
        (output, states), *rest = forward(_split_record(record, parts), config)
        return (output.reshape(record.value.shape), _join_states(states, parts)), *rest

    return run


def backward_with_split_values(backward: BackwardFunction) -> BackwardFunction:
    """Returns the backward function of records with more value channels, of one for those that are compiled."""

    @functools.wraps(backward)
    def run(pullback: Pullback, config: Any) -> dict[str, jax.Array]:
        record: LinearRecurrence = pullback.record
        parts = _num_parts(record)
        if parts == 1:
            return backward(pullback, config)
        split, (output, states) = _split_record(record, parts), pullback.cotangent
        cotangent = (output.reshape(split.value.shape), _split_states(states, parts))
        gradients = backward(dataclasses.replace(pullback, record=split, output=None, cotangent=cotangent), config)
        return {name: _join_gradient(name, x, getattr(record, name), parts) for name, x in gradients.items()}

    return run


def _num_parts(record: LinearRecurrence) -> int:
    """Returns the number of heads that a head becomes, with as many channels as possible."""
    values = record.value.shape[3]
    return values // max((size for size in VALUE_DIMS_WITH_GRADIENTS if values % size == 0), default=values)


def _split_record(record: LinearRecurrence, parts: int) -> LinearRecurrence:
    """Returns a record whose heads are split; what they share is in float32, as the kernels read it."""
    rows, tokens, heads, values = record.value.shape
    fields: dict[str, Any] = {"value": record.value.reshape(rows, tokens, heads * parts, values // parts)}
    for name, axis in SHARED_FIELDS.items():
        if (field := getattr(record, name)) is not None:
            fields[name] = jnp.repeat(field.astype(jnp.float32), parts, axis=axis)
    for name in STATE_FIELDS:
        if (states := getattr(record, name)) is not None:
            fields[name] = _split_states(states, parts)
    return dataclasses.replace(record, **fields)


def _split_states(states: jax.Array, parts: int) -> jax.Array:
    """Returns states [N, H * parts, K, V / parts] of states [N, H, K, V]."""
    count, heads, keys, values = states.shape
    split = states.reshape(count, heads, keys, parts, values // parts).swapaxes(2, 3)
    return split.reshape(count, heads * parts, keys, values // parts)


def _join_states(states: jax.Array, parts: int) -> jax.Array:
    """Returns states [N, H, K, V] of states [N, H * parts, K, V / parts]."""
    count, heads, keys, values = states.shape
    parts_of_heads = states.reshape(count, heads // parts, parts, keys, values).swapaxes(2, 3)
    return parts_of_heads.reshape(count, heads // parts, keys, values * parts)


def _join_gradient(name: str, gradient: jax.Array, field: jax.Array, parts: int) -> jax.Array:
    """Returns the gradient of a field of a record whose heads were split."""
    if name in STATE_FIELDS:
        return _join_states(gradient, parts)
    if name in SHARED_FIELDS:
        axis = SHARED_FIELDS[name]
        shape = (*field.shape[: axis + 1], parts, *field.shape[axis + 1 :])
        return gradient.reshape(shape).sum(axis + 1).astype(field.dtype)
    return gradient.reshape(field.shape)
