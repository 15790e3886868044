"""Runs implementations whose packed sequences have one state each on calls whose states are in slots.

A family declares once which field of its record has the states:

    SLOT_STATES = SlotStates("initial_state", lambda record: jnp.float32)

    @SLOT_STATES.around_forward
    def forward(record, config): ...             # never gets `state_slots`

Before the implementation runs, states are read from the slots; afterwards, the final states are stored in them.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.planning import slots
from ejkernel.types.pullback import Pullback

ForwardFunction = Callable[[Any, Any], Any]
BackwardFunction = Callable[[Pullback, Any], dict[str, jax.Array]]


@dataclasses.dataclass(frozen=True)
class SlotStates:
    """Says where the records of a family have their states; `state_slots` and `cu_seqlens` are fields of all of them.

    Attributes:
        field: The record field with the states, [slots, ...] if `state_slots` is not None.
        final_dtype: Returns the dtype in which an implementation returns the final states of a record.
    """

    field: str
    final_dtype: Callable[[Any], Any]

    def arrays(self, record: Any) -> tuple[jax.Array, jax.Array, jax.Array] | None:
        """Returns slots, the slot of each sequence and cumulative lengths; None if the states are not in slots."""
        arrays = (getattr(record, self.field), record.state_slots, record.cu_seqlens)
        return None if any(array is None for array in arrays) else arrays

    def with_plain_states(self, record: Any) -> Any:
        """Returns the record with one state per packed sequence, read from the slots; unchanged without slots."""
        if (arrays := self.arrays(record)) is None:
            return record
        return dataclasses.replace(record, **{self.field: slots.read_slots(*arrays)}, state_slots=None)

    def with_stored_states(self, record: Any, final_states: jax.Array) -> jax.Array:
        """Returns the slots of a record with the final states of its sequences; without slots, the final states."""
        arrays = self.arrays(record)
        return final_states if arrays is None else slots.write_slots(*arrays, final_states)

    def around_forward(self, forward: ForwardFunction) -> ForwardFunction:
        """Returns a forward function that also serves states in slots, from one that does not."""

        @functools.wraps(forward)
        def run(record: Any, config: Any) -> Any:
            if (arrays := self.arrays(record)) is None:
                return forward(record, config)
            (output, final), *rest = forward(self.with_plain_states(record), config)
            return (output, slots.write_slots(*arrays, final)), *rest

        return run

    def around_backward(self, backward: BackwardFunction) -> BackwardFunction:
        """Returns a backward function that also serves states in slots, from one that does not."""

        @functools.wraps(backward)
        def run(pullback: Pullback, config: Any) -> dict[str, jax.Array]:
            record = pullback.record
            if (arrays := self.arrays(record)) is None:
                return backward(pullback, config)
            held, _, starts = arrays
            outputs, cotangent = pullback.cotangent
            final = jnp.zeros((starts.shape[0] - 1, *held.shape[1:]), self.final_dtype(record))
            kept, final = slots.gradients_of_write(*arrays, final, cotangent)
            cotangents, plain = (outputs, final), self.with_plain_states(record)
            gradients = backward(dataclasses.replace(pullback, record=plain, output=None, cotangent=cotangents), config)
            if self.field in gradients:
                gradients[self.field] = slots.gradient_of_read(*arrays, gradients[self.field]) + kept
            return gradients

        return run
