"""Chunked linear recurrences without the delta rule, in both passes."""

from ejkernel.families.linear_recurrence import plain_states as recurrent_states
from ejkernel.ops import ConfigSpace, Implementation
from ejkernel_triton.linear_recurrence.chunked import config
from ejkernel_triton.requirements import triton_implementation, triton_requires

HANDLED_FIELDS = recurrent_states.STATE_LAYOUT_FIELDS | {
    *("decay", "dt", "skip", "initial_state", "cu_seqlens", "sequence_state", "precision")
}
"""Optional fields that the kernels honour, with those of states, which XLA moves before and after the kernels."""

DIFFERENTIABLE_FIELDS = frozenset({"query", "key", "value", "decay", "dt", "skip", "initial_state", "sequence_state"})


def implementations() -> tuple[Implementation, ...]:
    """Returns the implementation of recurrences without the delta rule."""
    return (
        triton_implementation(
            "linear_recurrence",
            forward="linear_recurrence.chunked.forward:forward",
            backward="linear_recurrence.chunked.backward:backward",
            gradients=DIFFERENTIABLE_FIELDS,
            paired=True,
            requires=triton_requires(head_dims=range(1, 257), handles=HANDLED_FIELDS),
            config=ConfigSpace.of(config, forward=config.RecurrenceConfig, kind=config.tuned_table_key),
        ),
    )
