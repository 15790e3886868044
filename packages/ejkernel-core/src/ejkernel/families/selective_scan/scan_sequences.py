"""Serves states in slots by implementations of the selective scan whose packed sequences have one state each.

@forward_with_slot_states
def forward(record, config): ...             # never gets `state_slots`
"""

import jax.numpy as jnp

from ejkernel.families.selective_scan.record import SelectiveScan
from ejkernel.planning.slot_states import SlotStates

PACKED_STATE_FIELDS = frozenset({"cu_seqlens", "state_slots"})
"""Optional fields that an implementation of packed sequences honours with the decorators."""

SLOT_STATES = SlotStates("initial_state", lambda record: jnp.promote_types(record.x.dtype, jnp.float32))
"""The states of the scan, in at least float32."""

with_plain_states = SLOT_STATES.with_plain_states
forward_with_slot_states = SLOT_STATES.around_forward
backward_with_slot_states = SLOT_STATES.around_backward


def sequences(record: SelectiveScan) -> int:
    """Returns the number of packed sequences, or of rows: each has one state."""
    return record.x.shape[0] if record.cu_seqlens is None else record.cu_seqlens.shape[0] - 1
