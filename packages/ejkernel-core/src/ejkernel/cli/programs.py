"""Builds the programs that `ejkernel bench` times: both passes of each implementation, and baselines."""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.cli.baselines import baselines, with_gradients
from ejkernel.ops.dispatch import Choice, Verdict
from ejkernel.ops.grad import CallPlan
from ejkernel.ops.params import Direction, set_fields_as_text
from ejkernel.types.arguments import array_fields
from ejkernel.types.pullback import ForwardResults, Pullback

PASSES = ("forward", "forward + backward")
REFERENCE = "reference"
BASELINE = "baseline"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Program:
    """Describes one pass of one implementation.

    Attributes:
        implementation: The name of the implementation. If another implementation runs the backward pass, its name
            follows after a plus sign.
        passes: One of `PASSES`.
        config: The configuration it runs with, as text.
        function: What to compile; a function of the lowered record.
    """

    implementation: str
    passes: str
    config: str
    function: Callable[[Any], Any]

    @property
    def has_backward(self) -> bool:
        """Returns whether the program also runs the backward pass."""
        return self.passes == PASSES[1]


def programs(plan: CallPlan, record: Any, choice: Choice, with_baselines: bool) -> list[Program]:
    """Returns the programs of a call: first those of implementations, then those of baselines.

    Args:
        plan: How the call is carried out.
        record: The lowered record.
        choice: The forward choice, with the verdict on every implementation.
        with_baselines: Whether to add the reference and JAX's own functions.
    """
    kernels = list(_kernel_programs(plan, record, choice))
    if not with_baselines:
        return kernels
    return [*kernels, *_baseline_programs(plan, record, {program.passes for program in kernels})]


def _baseline_programs(plan: CallPlan, record: Any, passes: set[str]) -> Iterator[Program]:
    """Yields the reference and JAX's own functions, in the passes that the kernels have."""
    grad_fields = _grad_fields(plan, record)
    for name, function in baselines(plan.op, record):
        yield Program(implementation=name, passes=PASSES[0], config=BASELINE, function=function)
        if PASSES[1] in passes:
            both = with_gradients(function, grad_fields)
            yield Program(implementation=name, passes=PASSES[1], config=BASELINE, function=both)


def _kernel_programs(plan: CallPlan, record: Any, choice: Choice) -> Iterator[Program]:
    """Yields both passes of every implementation that supports the call."""
    grad_fields = _grad_fields(plan, record)
    backward = plan.choose_implementation(record, "backward", grad_fields)
    for verdict in choice.verdicts:
        if verdict.status == "refused":
            continue
        piece, forward = _configured_kernel(plan, record, _choice_of_verdict(choice, verdict))
        name, config = verdict.implementation.name, set_fields_as_text(piece)
        output_only = functools.partial(_run_output_only, forward)
        yield Program(implementation=name, passes=PASSES[0], config=config, function=output_only)
        follower = _backward_verdict(backward, verdict)
        if not grad_fields or follower is None:
            continue
        back_piece, pull = _configured_kernel(plan, record, _choice_of_verdict(backward, follower))
        both = functools.partial(_output_and_gradients, forward, pull, grad_fields)
        names = " + ".join(dict.fromkeys((name, follower.implementation.name)))
        config = config if follower.implementation.paired else f"{config}; {set_fields_as_text(back_piece)}"
        yield Program(implementation=names, passes=PASSES[1], config=config, function=both)


def _grad_fields(plan: CallPlan, record: Any) -> frozenset[str]:
    return frozenset(plan.op.family.differentiable) & set(array_fields(record))


def _backward_verdict(backward_choice: Choice, verdict: Verdict) -> Verdict | None:
    """Chooses the backward pass of the same implementation, or the first backward pass that is not paired."""
    usable = [one for one in backward_choice.verdicts if one.status != "refused"]
    same = [one for one in usable if one.implementation == verdict.implementation]
    others = [] if verdict.implementation.paired else [one for one in usable if not one.implementation.paired]
    return next(iter((*same, *others)), None)


def _run_output_only(forward: Any, record: Any) -> Any:
    """Returns the output alone, so that XLA does not compute what only the backward pass needs."""
    return forward(record)[0]


def _output_and_gradients(
    forward: Any, backward: Any, grad_fields: frozenset[str], record: Any
) -> tuple[Any, dict[str, Any]]:
    """Returns the output, and the gradients of its sum."""
    results = ForwardResults(*forward(record))
    cotangent = jax.tree.map(jnp.ones_like, results.output)
    saved = Pullback(record=record, cotangent=cotangent, grad_fields=grad_fields, **results._asdict())
    return results.output, {name: gradient for name, gradient in backward(saved).items() if name in grad_fields}


def _choice_of_verdict(choice: Choice, verdict: Verdict) -> Choice:
    return dataclasses.replace(choice, verdicts=(dataclasses.replace(verdict, status="chosen"),))


def _configured_kernel(plan: CallPlan, record: Any, choice: Choice) -> tuple[Any, Callable[[Any], Any]]:
    """Returns the configuration that the chain chooses, and the implementation's function with it."""
    assert choice.implementation is not None  # callers have checked
    direction: Direction = choice.direction
    piece = plan.chain.choose(plan.request(choice, record)).part
    kernel = choice.implementation.function(direction)
    return piece, lambda argument: kernel(argument, piece)
