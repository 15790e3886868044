"""The device and the policies of a call for its passes, which JAX may trace after the blocks of the call have ended."""

import contextlib
import functools
from collections.abc import Callable, Generator
from typing import Any, TypeVar, cast

from ejkernel.ops.active_policies import active_policies
from ejkernel.ops.batch_invariance import batch_invariant
from ejkernel.ops.config.overlay import overlays, restored_overlays
from ejkernel.ops.config.policy import active_policy_overrides, restored_policy_overrides
from ejkernel.ops.device import current_device, target_device
from ejkernel.ops.isolation import isolate_sequences
from ejkernel.ops.second import second_derivatives
from ejkernel.types.forward_mode import forward_mode

Method = TypeVar("Method", bound=Callable[..., Any])

# In this order: a `batch_invariant` block isolates sequences, too.
_BLOCKS = {
    "batch_invariant": batch_invariant,
    "isolates_sequences": isolate_sequences,
    "differentiable_twice": second_derivatives,
    "forward_mode": forward_mode,
}


def blocks_around_call() -> dict[str, Any]:
    """Returns the fields of a `CallPlan` that record the blocks around a call: policies, overlays and overrides."""
    return {"overlays": overlays(), "policy_overrides": active_policy_overrides(), **active_policies()}


@contextlib.contextmanager
def context_of_plan(plan: Any) -> Generator[None]:
    """Makes the device of a `CallPlan` current, and turns on its policies that are off, and its overlays and policy
    overrides; others stay as they are.

    `jax.vjp` and `jax.export` trace a pass when it is used. Kernels and the calls within them read the device and the
    policies of the block around them. A block changes the jit key, so none is entered where nothing differs.
    """
    with contextlib.ExitStack() as stack:
        if current_device() != plan.device:
            stack.enter_context(target_device(plan.device))
        for field, block in _BLOCKS.items():
            if getattr(plan, field) and not active_policies()[field]:
                stack.enter_context(block())
        if plan.overlays and plan.overlays != overlays():
            stack.enter_context(restored_overlays(plan.overlays))
        if plan.policy_overrides and plan.policy_overrides != active_policy_overrides():
            stack.enter_context(restored_policy_overrides(plan.policy_overrides))
        yield


def in_context_of_plan(method: Method) -> Method:
    """Runs a method of `CallPlan` in `context_of_plan`."""

    @functools.wraps(method)
    def run(plan: Any, *args: Any, **kwargs: Any) -> Any:
        with context_of_plan(plan):
            return method(plan, *args, **kwargs)

    return cast(Method, run)
