"""The subject of a test: one implementation on one case, and the plan with which the call path uses only this
implementation.
"""

import dataclasses
import functools
from typing import Any, final

import jax
import jax.numpy as jnp

from ejkernel.families.contract import Family
from ejkernel.ops.config.chain import ConfigSelectorChain
from ejkernel.ops.device import current_device
from ejkernel.ops.dispatch import Choice, Verdict
from ejkernel.ops.grad import CallPlan
from ejkernel.ops.model import Case, Implementation, Op, Tolerance
from ejkernel.ops.params import BaseOperationConfig, Direction
from ejkernel.types.arguments import array_fields
from ejkernel_conformance.constant_draws import constant_draws

NONE: frozenset[str] = frozenset()


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Subject:
    """One implementation on one case of its operation.

    Attributes:
        op: The operation.
        implementation: The implementation under test.
        case: The inputs.
    """

    op: Op
    implementation: Implementation
    case: Case

    def __str__(self) -> str:
        return f"{self.op.name}-{self.implementation.name}-{self.case.name}"

    @functools.cached_property
    def args(self) -> Any:
        """Returns the argument record of the case."""
        return inputs(self.case, 0)

    @functools.cached_property
    def record(self) -> Any:
        """Returns the family record of the case."""
        return lowered(self.op, self.case)

    @property
    def tolerance(self) -> Tolerance:
        """Returns the tolerance of the operation for the dtype of the case."""
        return tolerance(self.op, self.record)


@functools.lru_cache(maxsize=64)
def inputs(case: Case, seed: int) -> Any:
    """Returns a case's argument record; every seed gives other values of the same shapes."""
    return case.make(jax.random.key(seed))


@functools.lru_cache(maxsize=64)
def lowered(op: Op, case: Case) -> Any:
    """Returns a case's family record, as the given operation makes it."""
    return jax.jit(op.lower)(inputs(case, 0))


@functools.cache
def abstract_args(case: Case) -> Any:
    """Returns the shapes of a case's argument record; nothing is computed."""
    with constant_draws():
        return jax.eval_shape(case.make, jax.random.key(0))


@functools.cache
def abstract_record(op: Op, case: Case) -> Any:
    """Returns the shapes of a case's family record; nothing is computed."""
    return jax.eval_shape(op.lower, abstract_args(case))


def tolerance(op: Op, record: Any) -> Tolerance:
    """Returns what an operation accepts at the dtype of a record.

    Raises:
        AssertionError: The operation declares no tolerance for this dtype.
    """
    dtype = jnp.dtype(op.family.dtype(record)).name
    if dtype not in op.tolerance:
        raise AssertionError(f"{op.name} has a case of dtype {dtype} and no tolerance for it")
    return op.tolerance[dtype]


@final
@dataclasses.dataclass(frozen=True, kw_only=True)
class PinnedPlan(CallPlan):
    """A plan that runs one implementation, even where others could serve the call.

    `platform=` cannot do that: it names a toolchain, which several implementations may share. The verdicts are still
    dispatch's. An implementation without a backward pass leaves that pass to whomever dispatch finds.

    Attributes:
        implementation: Name of the implementation.
    """

    implementation: str

    def choose_implementation(self, record: Any, direction: Direction, grad_fields: frozenset[str] = NONE) -> Choice:
        """Returns the implementation, or its refusal."""
        choice = super().choose_implementation(record, direction, grad_fields)
        found = next(v for v in choice.verdicts if v.implementation.name == self.implementation)
        if direction == "backward" and found.implementation.backward is None:
            return choice
        verdict = Verdict(found.implementation, "refused" if found.reasons else "chosen", found.reasons)
        return dataclasses.replace(choice, verdicts=(verdict,))


def pinned_plan(op: Op, implementation: Implementation, cfg: BaseOperationConfig | None = None) -> PinnedPlan:
    """Returns the plan that runs `implementation` on this machine's device, with `cfg` where given."""
    device, name = current_device(), implementation.name
    return PinnedPlan(op=op, device=device, platform="auto", cfg=cfg, chain=_chain(), implementation=name)


@functools.cache
def _chain() -> ConfigSelectorChain:
    # Without the user's store: what is tested must not depend on what was tuned on this machine.
    return ConfigSelectorChain()


def refusal(
    subject: Subject, direction: Direction, record: Any = None, grad_fields: frozenset[str] | None = None
) -> str:
    """Returns why dispatch does not let the subject run in one direction, in its words; empty if it does.

    Args:
        subject: Implementation and case.
        direction: Which pass.
        record: Another record than the case's.
        grad_fields: Fields whose gradient the backward pass must give; None for all that have one.
    """
    record = abstract_record(subject.op, subject.case) if record is None else record
    if grad_fields is None:
        grad_fields = differentiable_fields(subject.op.family, record) if direction == "backward" else NONE
    returns_lse = subject.op.returns_residual_lse(abstract_args(subject.case))
    plan = dataclasses.replace(pinned_plan(subject.op, subject.implementation), returns_lse=returns_lse)
    choice = (
        plan.choose_both_passes(record, grad_fields)[1]
        if direction == "backward"
        else plan.choose_implementation(record, direction)
    )
    if choice.implementation is not None:
        return ""
    return "; ".join(f"{v.implementation.name}: {', '.join(v.reasons)}" for v in choice.verdicts)


def differentiable_fields(family: Family, record: Any) -> frozenset[str]:
    """Returns the fields of a record that are there and have a gradient."""
    return frozenset(family.differentiable) & array_fields(record).keys()
