"""Runs the passes of one operation inside of another's kernels, by the implementation that serves them best."""

from typing import Any

from ejkernel.errors import NoImplementationError
from ejkernel.ops.call import default_chain
from ejkernel.ops.device import current_device
from ejkernel.ops.grad import CallPlan
from ejkernel.ops.pairs import exclude_paired
from ejkernel.ops.plugins import registry
from ejkernel.types.pullback import Pullback


def dispatched_forward(op: str, record: Any) -> tuple[Any, Any]:
    """Returns the output and the residuals of a family record, which the caller's own backward pass hands on.

    What connects the passes are the residuals of the family alone, so no paired implementation serves.

    Args:
        op: Name of the operation.
        record: The family record.

    Raises:
        NoImplementationError: No implementation serves it.
    """
    plan = _plan_of_nested_call(op)
    choice = exclude_paired(plan.choose_implementation(record, "forward"))
    results = plan.forward(record, plan.choice_with_config(choice, record))
    return results.output, results.residuals


def dispatched_backward(op: str, pullback: Pullback) -> dict[str, Any]:
    """Returns the requested gradients of a family record, by field.

    Args:
        op: Name of the operation.
        pullback: The record, and the output and residuals of `dispatched_forward`.

    Raises:
        NoImplementationError: No implementation serves it.
    """
    plan = _plan_of_nested_call(op)
    choice = exclude_paired(plan.choose_implementation(pullback.record, "backward", pullback.grad_fields))
    if choice.implementation is None:
        raise NoImplementationError(choice)
    return plan.backward(pullback, plan.choice_with_config(choice, pullback.record))


def _plan_of_nested_call(op: str) -> CallPlan:
    return CallPlan(op=registry().ops[op], device=current_device(), platform="auto", cfg=None, chain=default_chain())
