"""Serves states in slots by implementations of the causal convolution whose packed sequences have one state each.

@forward_with_slot_states
def forward(record, config): ...             # never gets `state_slots`
"""

from ejkernel.planning.slot_states import SlotStates

SLOT_STATES = SlotStates("sequence_state", lambda record: record.x.dtype)
"""The inputs that the taps need of earlier tokens, in the input's dtype."""

with_plain_states = SLOT_STATES.with_plain_states
with_stored_states = SLOT_STATES.with_stored_states
forward_with_slot_states = SLOT_STATES.around_forward
backward_with_slot_states = SLOT_STATES.around_backward
