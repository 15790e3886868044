"""Tunes for devices that are not in this machine, by a model that predicts how fast a kernel is.

A distribution offers targets by an entry point of the group `ejkernel.targets`: a function without arguments that
returns `{name: Target}`.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.ops.config.chain import TunerMethods
from ejkernel.ops.config.measurement import TuningResult
from ejkernel.ops.device import DeviceInfo, target_device
from ejkernel.ops.dispatch import Choice
from ejkernel.ops.grad import CallPlan
from ejkernel.ops.lowering import lowered_record
from ejkernel.ops.params import Direction
from ejkernel.ops.tuning import BOTH_DIRECTIONS, choices_to_tune, gradient_fields_of_pair
from ejkernel.types.arguments import array_fields
from ejkernel.types.pullback import ForwardResults, Pullback

TARGET_ENTRY_POINT_GROUP = "ejkernel.targets"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Target:
    """A device that somebody can predict the speed of.

    Attributes:
        device: What dispatch and stored configurations know it as.
        tuner: Whether to show a progress bar -> what predicts; raises TunerError where it cannot work. It is given
            records and `Pullback`s whose floating arrays are `jax.ShapeDtypeStruct`s; the others have values.
    """

    device: DeviceInfo
    tuner: Callable[[bool], TunerMethods]


def tune_by_prediction(
    plan: CallPlan, make: Callable[[jax.Array], Any], directions: tuple[Direction, ...] = BOTH_DIRECTIONS
) -> list[TuningResult]:
    """Has the given passes of a call predicted for the plan's device, and stores the winners; nothing is run on it.

    Args:
        plan: How the call is carried out; its chain has a target's tuner, and keeps the results.
        make: PRNG key -> argument record; can be traced. Only what it makes of integers and the like is computed.
        directions: Which passes.

    Returns:
        A result for each pass that an implementation serves.

    Raises:
        TunerError: The tuner's own, or the policy forbids it.
    """
    record = make_with_abstract_floats(lambda: lowered_record(plan.op, make(jax.random.key(0))))
    results: list[TuningResult | None] = []
    with target_device(plan.device):
        for choice, forward in choices_to_tune(plan, record, directions):
            argument = _abstract_kernel_argument(plan, record, choice, forward)
            results.append(
                plan.chain.tune(
                    plan.request(choice, record), functools.partial(_constant_argument, argument), predicted=True
                )
            )
    return [result for result in results if result is not None]


def _constant_argument(argument: Any) -> Any:
    return argument


def make_with_abstract_floats(make: Callable[[], Any]) -> Any:
    """Returns what a function that can be traced makes: shapes of floating arrays, and values of all others."""
    leaves, structure = jax.tree.flatten(jax.eval_shape(make))
    is_floating = [jnp.issubdtype(leaf.dtype, jnp.inexact) for leaf in leaves]
    # XLA does not compute the large arrays, because the returned arrays do not depend on them.
    values = iter(
        jax.jit(lambda: [x for x, real in zip(jax.tree.leaves(make()), is_floating, strict=True) if not real])()
    )
    described = [leaf if real else np.asarray(next(values)) for leaf, real in zip(leaves, is_floating, strict=True)]
    return jax.tree.unflatten(structure, described)


def _abstract_kernel_argument(plan: CallPlan, record: Any, choice: Choice, forward: Choice) -> Any:
    """Returns what a kernel is given: a record, or a `Pullback` that has shapes but for the record."""
    assert forward.implementation is not None  # the caller has looked
    is_paired = forward.implementation.paired
    if choice is forward and not is_paired:
        return record
    kernel = forward.implementation.function("forward")
    config = plan.chain.choose(plan.request(forward, record)).part
    results = jax.eval_shape(lambda record: ForwardResults(*kernel(record, config)), record)
    if is_paired:
        grad_fields = gradient_fields_of_pair(plan, record, choice)
        return Pullback(record=record, residuals=None, output=None, cotangent=results.output, grad_fields=grad_fields)
    grad_fields = frozenset(plan.op.family.differentiable) & set(array_fields(record))
    return Pullback(record=record, cotangent=results.output, grad_fields=grad_fields, **results._asdict())
