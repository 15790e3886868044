"""Devices that need not be here: tuning for them, by whoever can predict how fast a kernel is.

A distribution offers targets by an entry point of the group `ejkernel.targets`: a function without arguments that
returns `{name: Target}`.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.ops.arguments import array_fields
from ejkernel.ops.config.chain import Measures
from ejkernel.ops.config.measurement import TuningResult
from ejkernel.ops.config.params import Direction
from ejkernel.ops.device import DeviceInfo, target_device
from ejkernel.ops.dispatch import Choice
from ejkernel.ops.execution.lowering import lowered
from ejkernel.ops.execution.tuner import BOTH
from ejkernel.ops.grad import Plan
from ejkernel.ops.pullback import Pullback

GROUP = "ejkernel.targets"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Target:
    """A device that somebody can predict the speed of.

    Attributes:
        device: What dispatch and stored configurations know it as.
        tuner: Whether to show a progress bar -> what predicts; raises TunerError where it cannot work. It is given
            records and `Pullback`s whose floating arrays are `jax.ShapeDtypeStruct`s; the others have values.
    """

    device: DeviceInfo
    tuner: Callable[[bool], Measures]


def tune_described(
    plan: Plan, make: Callable[[jax.Array], Any], directions: tuple[Direction, ...] = BOTH
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
    record = describe(lambda: lowered(plan.op, make(jax.random.key(0))))
    results: list[TuningResult | None] = []
    with target_device(plan.device):
        forward = plan.pick(record, "forward")
        if forward.implementation is None:
            return []
        if "forward" in directions:
            results.append(plan.chain.tune(plan.request(forward, record), lambda: record))
        wanted = frozenset(plan.op.family.differentiable) & set(array_fields(record))
        backward = plan.pick(record, "backward", wanted)
        if "backward" in directions and wanted and backward.implementation is not None:
            pullback = _pullback(plan, record, forward, wanted)
            results.append(plan.chain.tune(plan.request(backward, record), lambda: pullback))
    return [result for result in results if result is not None]


def describe(make: Callable[[], Any]) -> Any:
    """What a function that can be traced makes: shapes of floating arrays, and values of all others."""
    leaves, structure = jax.tree.flatten(jax.eval_shape(make))
    floating = [jnp.issubdtype(leaf.dtype, jnp.inexact) for leaf in leaves]
    # XLA leaves out what the others do not depend on: the large arrays.
    values = iter(jax.jit(lambda: [x for x, real in zip(jax.tree.leaves(make()), floating, strict=True) if not real])())
    made = [leaf if real else np.asarray(next(values)) for leaf, real in zip(leaves, floating, strict=True)]
    return jax.tree.unflatten(structure, made)


def _pullback(plan: Plan, record: Any, forward: Choice, wanted: frozenset[str]) -> Pullback:
    """What the backward implementation is given, as shapes but for the record."""
    assert forward.implementation is not None  # the caller has looked
    kernel = forward.implementation.function("forward")
    config = plan.chain.choose(plan.request(forward, record)).part
    output, residuals = jax.eval_shape(lambda record: kernel(record, config), record)
    return Pullback(record=record, residuals=residuals, output=output, cotangent=output, wanted=wanted)
