"""The policies that every plan of a call carries, whether the caller or another operation makes the call."""

from ejkernel.ops.batch_invariance import is_batch_invariant
from ejkernel.ops.isolation import are_sequences_isolated
from ejkernel.ops.second import second_derivatives_enabled
from ejkernel.types.forward_mode import is_forward_mode_enabled


def active_policies() -> dict[str, bool]:
    """Returns the fields of `CallPlan` that say in which blocks a call is made."""
    return {
        "differentiable_twice": second_derivatives_enabled(),
        "isolates_sequences": are_sequences_isolated() or is_batch_invariant(),
        "batch_invariant": is_batch_invariant(),
        "forward_mode": is_forward_mode_enabled(),
    }
