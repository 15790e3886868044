"""Tuning of calls: which passes are measured, and with which arguments."""

import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.errors import TunerError
from ejkernel.ops.config.measurement import TuningResult
from ejkernel.ops.config.tuner import is_under_trace
from ejkernel.ops.dispatch import Choice
from ejkernel.ops.grad import CallPlan
from ejkernel.ops.lowering import lowered_record
from ejkernel.ops.params import Direction
from ejkernel.types.arguments import array_fields
from ejkernel.types.pullback import ForwardResults, Pullback

BOTH_DIRECTIONS: tuple[Direction, ...] = ("forward", "backward")


def tune_missing(plan: CallPlan, args: Any) -> None:
    """Measures the forward pass of an eager call before it runs, unless a tier before autotune has its configuration.

    In a job of several processes only process 0 measures; the others take its decision. Arrays that are spread over
    processes cannot be measured by one of them; such a call can be tuned only offline.
    """
    leaves, structure = jax.tree.flatten(args)
    call = (plan, structure, tuple(map(jax.api_util.shaped_abstractify, leaves)))
    settled = plan.chain.cache.settled
    if call in settled:
        return
    record, choice = _record_and_choice(plan, args)
    if choice.implementation is None:
        return
    here = all(getattr(leaf, "is_fully_addressable", True) for leaf in leaves)
    selection = plan.chain.choose(
        plan.request(choice, record), tuning_argument_of(plan, record, choice) if here else None
    )
    if selection.tier != "overlay":  # an overlay does not hold for the call outside of its block
        settled.add(call)


def tune_call(
    plan: CallPlan,
    args: Any,
    directions: tuple[Direction, ...] = BOTH_DIRECTIONS,
    *,
    mesh: Any = None,
    in_specs: Any = None,
) -> list[TuningResult]:
    """Measures the given passes of a concrete call and stores the winners.

    Args:
        plan: How the call is carried out; its chain keeps the results.
        args: Concrete argument record.
        directions: Which passes.
        mesh: With in_specs: what is tuned is one shard of the call.
        in_specs: Partition specs of the first arguments, in public order.

    Returns:
        A result for each pass that an implementation serves. In a job of several processes only process 0 measures
        and has results; the winners are in force everywhere.

    Raises:
        TunerError: In the same cases as in `Tuner.tune`, or if the policy forbids tuning.
    """
    if is_under_trace(args):
        raise TunerError("the tuner was asked to measure under a trace; call it eagerly, or record and tune later")
    record, _ = _record_and_choice(plan, args, mesh, in_specs)
    results: list[TuningResult | None] = []
    for choice, forward in choices_to_tune(plan, record, directions):
        make = functools.partial(tuning_argument_of, plan, record, choice, forward)
        results.append(plan.chain.tune(plan.request(choice, record), make))
    return [result for result in results if result is not None]


def choices_to_tune(plan: CallPlan, record: Any, directions: tuple[Direction, ...]) -> Iterator[tuple[Choice, Choice]]:
    """Yields the choices to tune, each with the forward choice that it follows; a pair is one choice, whichever pass is
    asked for.
    """
    grad_fields = _grad_fields(plan, record)
    forward, backward = plan.choose_both_passes(record, grad_fields)
    if "backward" not in directions or not grad_fields or backward.implementation is None:
        forward, backward = plan.choose_implementation(record, "forward"), None
    if forward.implementation is None:
        return
    if "forward" in directions or forward.implementation.paired:
        yield forward, forward
    if backward is not None and not forward.implementation.paired:
        yield backward, forward


def tuning_argument_of(plan: CallPlan, record: Any, choice: Choice, forward: Choice | None = None) -> Any:
    """Returns the argument that the kernel of a choice is measured with: a record, or a `Pullback` with a random
    cotangent.

    Args:
        plan: How the call is carried out.
        record: Concrete family record.
        choice: What is measured.
        forward: For a backward pass, the forward choice that it follows.
    """
    implementation = choice.implementation
    assert implementation is not None  # callers have looked
    if implementation.paired:
        return _tuning_argument_of_pair(plan, record, choice)
    return (
        record
        if forward is None or choice is forward
        else _random_pullback(plan, record, forward, _grad_fields(plan, record))
    )


def _grad_fields(plan: CallPlan, record: Any) -> frozenset[str]:
    return frozenset(plan.op.family.differentiable) & set(array_fields(record))


def _tuning_argument_of_pair(plan: CallPlan, record: Any, choice: Choice) -> Pullback:
    """Returns the argument to measure a pair with; without a cotangent if its backward pass lacks a gradient."""
    grad_fields = gradient_fields_of_pair(plan, record, choice)
    assert choice.implementation is not None  # callers have looked
    function, config = choice.implementation.function("forward"), plan.request(choice, record).heuristic()
    output = jax.eval_shape(lambda r: ForwardResults(*function(r, config)).output, record)
    cotangent = _random_cotangent(output) if grad_fields else None
    return Pullback(record=record, residuals=None, output=None, cotangent=cotangent, grad_fields=grad_fields)


def gradient_fields_of_pair(plan: CallPlan, record: Any, choice: Choice) -> frozenset[str]:
    """Returns the fields whose gradient a pair is measured with: all that have one, or none where it does not serve
    them.
    """
    grad_fields = _grad_fields(plan, record)
    verdicts = plan.choose_implementation(record, "backward", grad_fields).verdicts
    serving = [v for v in verdicts if v.implementation is choice.implementation and v.status != "refused"]
    return grad_fields if serving else frozenset()


def _random_cotangent(output: Any) -> Any:
    draw = functools.partial(jax.random.normal, jax.random.key(1), dtype=jnp.float32)
    return jax.tree.map(lambda x: draw(shape=x.shape).astype(x.dtype), output)


def _random_pullback(plan: CallPlan, record: Any, forward: Choice, grad_fields: frozenset[str]) -> Pullback:
    """Returns what the backward implementation is given, with a random cotangent."""
    assert forward.implementation is not None  # the caller has looked
    kernel = forward.implementation.function("forward")
    config = plan.chain.choose(plan.request(forward, record)).part
    results = jax.jit(lambda r: ForwardResults(*kernel(r, config)))(record)
    return Pullback(
        record=record, cotangent=_random_cotangent(results.output), grad_fields=grad_fields, **results._asdict()
    )


def _record_and_choice(plan: CallPlan, args: Any, mesh: Any = None, in_specs: Any = None) -> tuple[Any, Choice]:
    record = jax.jit(lambda args: lowered_record(plan.op, args, mesh, in_specs))(args)
    return record, plan.choose_implementation(record, "forward")
