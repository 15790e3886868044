"""Linear recurrences token by token, without tensor cores: no bit of a token depends on the rest of a call."""

from collections.abc import Iterable
from typing import Any

from ejkernel.families.linear_recurrence import slotted_states
from ejkernel.ops import ConfigSpace, Implementation
from ejkernel_triton.linear_recurrence import decode, low_rank
from ejkernel_triton.linear_recurrence.steps import config
from ejkernel_triton.requirements import triton_implementation, triton_requires

HANDLED_FIELDS = (decode.HANDLED_FIELDS | low_rank.VECTOR_FIELDS) - {"parents", "keeps_token_states"}
"""Optional fields that the kernel honours: all but those of trees."""


def _invariance_limits(record: Any) -> Iterable[str]:
    """Yields why rows of a record depend on the rest of their call."""
    held = slotted_states(record)
    if held is not None and held.slots.dtype.itemsize < 4:
        yield f"state_slots: slots of {held.slots.dtype} round the states between two calls"


def implementations() -> tuple[Implementation, ...]:
    """Returns the implementation; outside of `batch_invariant` blocks it comes after XLA's, which multiplies chunks."""
    return (
        triton_implementation(
            "linear_recurrence",
            name="triton_steps",
            forward="linear_recurrence.steps.forward:forward",
            requires=triton_requires(head_dims=range(1, 257), handles=HANDLED_FIELDS),
            config=ConfigSpace.of(config, forward=config.StepTile),
            priority=-20,
            invariant_to=frozenset({"batch", "padding", "packing", "chunking"}),
            invariance_limits=_invariance_limits,
            invariant_priority=20,
        ),
    )
