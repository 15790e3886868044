"""Runs one operation inside of another's call or kernels, by the implementation that serves it best."""

from typing import Any

import jax

from ejkernel.errors import NoImplementationError
from ejkernel.ops.call import default_chain
from ejkernel.ops.callers import caller_platform, nested_call_notes
from ejkernel.ops.device import current_device
from ejkernel.ops.grad import CallPlan
from ejkernel.ops.pairs import exclude_paired
from ejkernel.ops.plan_context import blocks_around_call
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


def platform_of_nested_call(op: str, args: Any) -> str:
    """Returns the platform for a call of an operation within the call of another one, and notes for `explain` which
    implementation serves it.

    It is the outer call's platform where that has an implementation for the inner call, else `"auto"`.

    Args:
        op: Name of the inner operation.
        args: Its argument record.
    """
    platform = caller_platform.get()
    plan = _plan_of_nested_call(op, platform)
    record = jax.eval_shape(plan.op.lower, args)
    chosen, reason = plan.choose(record, "forward").implementation, ""
    if chosen is None:
        reason = f", as no implementation of platform {platform!r} serves it"
        platform = "auto"
        chosen = _plan_of_nested_call(op, platform).choose(record, "forward").implementation
    notes = nested_call_notes.get()
    if notes is not None and chosen is not None:
        notes.append(f"within the call, {op} runs on {chosen.name}{reason}")
    return platform


def _plan_of_nested_call(op: str, platform: str = "auto") -> CallPlan:
    return CallPlan(
        op=registry().ops[op],
        device=current_device(),
        platform=platform,
        cfg=None,
        chain=default_chain(),
        **blocks_around_call(),
    )
