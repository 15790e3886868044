"""The gradient rule, a single `jax.custom_vjp` for every operation.

The forward and the backward implementation are chosen separately, unless an implementation is paired. The residuals of
the family connect them: every backward pass of the family can read them. A paired implementation may have private
residuals as well, which its own backward function alone reads.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

from ejkernel import _compat
from ejkernel._collective_calls import call_without_varying_axes
from ejkernel.errors import NoImplementationError
from ejkernel.ops.checkpoint_names import name_results
from ejkernel.ops.config.chain import ConfigSelectorChain, Request
from ejkernel.ops.config.policy import effective_policy
from ejkernel.ops.device import DeviceInfo
from ejkernel.ops.dispatch import Choice, choose, refuse_backward_without_handles
from ejkernel.ops.model import Op, load_object
from ejkernel.ops.pairs import choose_pair
from ejkernel.ops.params import BaseOperationConfig, Direction
from ejkernel.ops.plan_context import context_of_plan, in_context_of_plan
from ejkernel.ops.plugins import registry
from ejkernel.ops.second import backward_pass, forward_pass, run_refusing_derivatives
from ejkernel.ops.tangents import call_in_forward_mode
from ejkernel.promotion import with_standard_promotion
from ejkernel.types.arguments import arguments, array_fields, static
from ejkernel.types.pullback import ForwardResults, Pullback, tracing_differentiated_call
from ejkernel.types.residual_trees import ResidualTrees


@dataclasses.dataclass(frozen=True, kw_only=True)
class CallPlan:
    """Everything that decides how a call runs, except its record. It is a static argument of the compiled function.

    Attributes:
        op: The operation.
        device: The device on which it will run.
        platform: A toolchain, or `"auto"`.
        cfg: The call's own configuration, or None.
        chain: Chooses the configuration.
        returns_lse: Whether the call returns `(output, lse)`, with the residuals' lse, instead of the output.
        differentiable_twice: Whether the call was made in a `second_derivatives` block.
        isolates_sequences: Whether the call was made in an `isolate_sequences` block.
        batch_invariant: Whether the call was made in a `batch_invariant` block.
        forward_mode: Whether the call was made in a `forward_mode` block.
        overlays: The overlays around the call, innermost first.
        policy_overrides: What `policy_override` blocks around the call replace.
    """

    op: Op
    device: DeviceInfo
    platform: str
    cfg: BaseOperationConfig | None
    chain: ConfigSelectorChain
    returns_lse: bool = False
    differentiable_twice: bool = False
    isolates_sequences: bool = False
    batch_invariant: bool = False
    forward_mode: bool = False
    overlays: tuple[Any, ...] = ()
    policy_overrides: tuple[Any, ...] = ()

    @property
    def tunes_on_miss(self) -> bool:
        """Returns whether the current policy measures calls for which no tier has a configuration."""
        return effective_policy(self.chain.policy, self.chain).tunes_on_miss

    @property
    def may_choose_pair(self) -> bool:
        """Returns whether the operation has a paired implementation for the device."""
        candidates = registry().implementations.get(self.op.name, ())
        return any(x.paired and self.device.names & x.requires.devices for x in candidates)

    @in_context_of_plan
    def choose_implementation(
        self, record: Any, direction: Direction, grad_fields: frozenset[str] = frozenset()
    ) -> Choice:
        """Chooses an implementation."""
        choice = choose(
            self.op, record, self.device, self.platform, direction, grad_fields, self.cfg, self.batch_invariant
        )
        return (
            refuse_backward_without_handles(choice, "lse_cotangent")
            if self.returns_lse and direction == "backward"
            else choice
        )

    def choose(self, record: Any, direction: Direction, grad_fields: frozenset[str] = frozenset()) -> Choice:
        """Chooses an implementation and, if one serves the call, its configuration."""
        return self.choice_with_config(self.choose_implementation(record, direction, grad_fields), record)

    @in_context_of_plan
    def choice_with_config(self, choice: Choice, record: Any) -> Choice:
        """Returns a choice with the configuration of its implementation, if it has one."""
        if choice.implementation is None:
            return choice
        selection = self.chain.choose(self.request(choice, record))
        return dataclasses.replace(choice, config=selection.part, tier=selection.tier, trail=selection.trail)

    def choose_both_passes(self, record: Any, grad_fields: frozenset[str]) -> tuple[Choice, Choice]:
        """Chooses the forward and the backward implementation of a call that is differentiated."""
        return choose_pair(
            self.choose_implementation(record, "forward"), self.choose_implementation(record, "backward", grad_fields)
        )

    def request(self, choice: Choice, record: Any) -> Request:
        """Returns the request to the configuration chain for the chosen implementation."""
        assert choice.implementation is not None  # the callers have checked it
        return Request(
            op=self.op,
            implementation=choice.implementation,
            direction="both" if choice.implementation.paired else choice.direction,
            batch_invariant=self.batch_invariant and (choice.implementation.paired or choice.direction == "forward"),
            device=self.device,
            record=record,
            override=self.cfg,
        )

    def forward(self, record: Any, choice: Choice | None = None) -> ForwardResults:
        """Runs the forward pass.

        Args:
            record: The family record.
            choice: Result of `choose` or `choice_with_config`; None chooses here.

        Raises:
            NoImplementationError: All implementations are refused; the message is the table of reasons.
        """
        choice = self.choose(record, "forward") if choice is None else choice
        isolate = None if self.op.padding_only or not self.isolates_sequences else self.op.family.request_isolation
        argument = record if isolate is None else isolate.record(record)
        results = ForwardResults(*self._run_implementation(choice, argument))
        return _check_private_residuals(choice, results)

    @in_context_of_plan
    def forward_with_tangents(
        self, record: Any, vs: list[Any], by_field: Callable[[Any, list[Any]], dict[str, Any]], choice: Choice
    ) -> tuple[Any, Any]:
        """Runs the `forward_mode` function of a configured choice.

        Args:
            record: The family record.
            vs: Tangents of some leaves of the record.
            by_field: Returns the tangents by record field.
            choice: Of the forward direction.

        Returns:
            `(output, residuals)`, and the tangents of both.
        """
        assert choice.implementation is not None
        assert choice.implementation.forward_mode is not None
        function = load_object(choice.implementation.forward_mode)
        isolate = None if self.op.padding_only or not self.isolates_sequences else self.op.family.request_isolation

        def run(argument: tuple[Any, list[Any]]) -> tuple[Any, Any]:
            record, tangents = argument[0], by_field(*argument)
            if isolate is not None:
                record, tangents = _isolate_tangents(isolate.record, record, tangents)
            return function(record, tangents, choice.config)

        with jax.named_scope(f"ejkernel.{self.op.name}.forward_mode.{choice.implementation.name}"):
            return call_without_varying_axes(run, (record, vs))

    def differentiated(self, run: Any, choice: Choice, argument: Any) -> Any:
        """Runs a forward pass of a record, or a backward pass of a pullback, so that it can be differentiated again.

        Raises:
            NotImplementedError: When a second derivative is taken outside of a `second_derivatives` block.
        """
        if choice.implementation is None:
            raise NoImplementationError(choice)
        if not self.differentiable_twice:
            return run_refusing_derivatives(self.op.name, choice.implementation, run, argument)
        rule = forward_pass if choice.direction == "forward" else backward_pass
        return rule(self.op.family, run, argument)

    @in_context_of_plan
    def _run_implementation(self, choice: Choice, argument: Any) -> Any:
        if choice.implementation is None:
            raise NoImplementationError(choice)
        # The scope names the kernel in profiles. JAX cannot infer over which mesh axes a kernel's results vary, so the
        # kernel is called without them.
        with jax.named_scope(f"ejkernel.{self.op.name}.{choice.direction}.{choice.implementation.name}"):
            function = choice.implementation.function(choice.direction)
            return call_without_varying_axes(lambda argument: function(argument, choice.config), argument)

    def backward(self, pullback: Pullback, choice: Choice) -> dict[str, Any]:
        """Runs the backward pass of a configured choice, and returns gradients by field name."""
        isolate = self.op.family.request_isolation if self.isolates_sequences else None
        return self._run_implementation(choice, pullback if isolate is None else isolate.pullback(pullback))

    def select_gradients(self, choice: Choice, pullback: Pullback) -> dict[str, Any]:
        """Runs the backward pass of a configured choice, and returns the requested gradients alone."""
        gradients = self.backward(pullback, choice)
        missing = pullback.grad_fields - set(gradients)
        if missing:
            raise RuntimeError(f"the backward pass of {self.op.name} gave no gradient for {', '.join(sorted(missing))}")
        return {name: gradients[name] for name in sorted(pullback.grad_fields)}


def _isolate_tangents(isolate: Any, record: Any, tangents: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    def isolated_fields(fields: dict[str, Any]) -> dict[str, Any]:
        isolated = isolate(dataclasses.replace(record, **fields))
        return {name: getattr(isolated, name) for name in fields}

    fields = {name: getattr(record, name) for name in tangents}
    return isolate(record), jax.jvp(isolated_fields, (fields,), (tangents,))[1]


def _check_private_residuals(choice: Choice, results: ForwardResults) -> ForwardResults:
    """Returns the results of a forward pass.

    Raises:
        ValueError: An implementation that is not paired returned private residuals, which nothing would read.
    """
    if results.private_residuals is not None and choice.implementation and not choice.implementation.paired:
        name = choice.implementation.name
        raise ValueError(f"{name}: its forward function returned private residuals, which need paired=True")
    return results


@arguments
class _SavedForBackward:
    """The values that the gradient rule keeps from the forward pass for the backward pass.

    `ResidualTrees` packs them: other fields may be differentiated in a later trace of the call, for which another
    implementation may be chosen.

    Attributes:
        pullback: The argument of the backward function, without the cotangent.
        config: The configuration of both passes of a paired implementation, on which its private residuals depend. The
            chain is not asked again: the backward pass may be traced outside of the overlay that it came from.
    """

    pullback: Pullback
    config: Any = static(None)


MAX_ARRAYS_OF_PAIRS = 32
"""The saved arrays of paired implementations are padded to a multiple of this, so that all have equally many."""


@with_standard_promotion
def _forward_only(plan: CallPlan, record: Any) -> Any:
    results = plan.forward(record)
    return (results.output, results.residuals.lse) if plan.returns_lse else results.output


@with_standard_promotion
def _forward(plan: CallPlan, trees: ResidualTrees, marked: Any) -> tuple[Any, list[jax.Array]]:
    record = jax.tree.map(lambda x: x.value, marked, is_leaf=_is_custom_vjp_primal)
    # JAX marks the arrays that are differentiated, so a kernel computes no gradient that is not needed.
    grad_fields = _differentiated_record_fields(plan.op, marked)
    # The backward pass runs later but is chosen now, so that a call without one fails at its own line.
    forward, backward = plan.choose_both_passes(record, grad_fields)
    if backward.implementation is None:
        raise NoImplementationError(backward)
    forward = plan.choice_with_config(forward, record)
    with tracing_differentiated_call():
        results = plan.differentiated(lambda record: plan.forward(record, forward), forward, record)
    assert forward.implementation is not None  # it has run
    # The caller gets the output that carries the name. If a layer used the unnamed one, `jax.checkpoint` would run the
    # kernel again to compute it, although its policy saves the named one.
    results = name_results(results)
    pullback = Pullback(record=record, cotangent=None, grad_fields=grad_fields, **results._asdict())
    config = forward.config if forward.implementation.paired else None
    result = (results.output, results.residuals.lse) if plan.returns_lse else results.output
    return result, trees.pack(_SavedForBackward(pullback=pullback, config=config))


@with_standard_promotion
def _backward(plan: CallPlan, trees: ResidualTrees, packed: list[jax.Array], cotangent: Any) -> tuple[Any]:
    saved_for_backward = trees.unpack(packed)
    saved, lse_cotangent = saved_for_backward.pullback, None
    if plan.returns_lse:
        cotangent, lse_cotangent = cotangent
        lse_cotangent = None if _is_symbolic_zero(lse_cotangent) else lse_cotangent
    cotangent = jax.tree.map(_zeros_for_symbolic, cotangent, is_leaf=_is_symbolic_zero)
    # The choice depends on shapes and the device alone, so this is the implementation that the forward pass chose.
    _, backward = plan.choose_both_passes(saved.record, saved.grad_fields)
    if saved_for_backward.config is None:
        backward = plan.choice_with_config(backward, saved.record)
    else:
        # A paired kernel must use one configuration in both passes: its private residuals have its tile sizes.
        backward = dataclasses.replace(backward, config=saved_for_backward.config)
    pullback = dataclasses.replace(saved, cotangent=cotangent, lse_cotangent=lse_cotangent)
    gradients = plan.differentiated(functools.partial(plan.select_gradients, backward), backward, pullback)
    # JAX takes None as a cotangent of zeros. Fields without a gradient, such as integer ids, get None. A differentiated
    # field never gets None: `_differentiated_record_fields` has raised an error for a differentiated field without a
    # gradient.
    cotangents = {name: gradients[name] if name in saved.grad_fields else None for name in array_fields(saved.record)}
    return (dataclasses.replace(saved.record, **cotangents),)


def _differentiated_record_fields(op: Op, marked: Any) -> frozenset[str]:
    """Returns the record fields that are being differentiated.

    Raises:
        NotImplementedError: A field without a gradient is among them.
    """
    fields = array_fields(marked)
    perturbed = {name for name, value in fields.items() if _any_perturbed(value)}
    undefined = sorted(perturbed - set(op.family.differentiable))
    if undefined:
        raise NotImplementedError(f"{op.name} has no gradient with respect to {', '.join(undefined)}")
    return frozenset(perturbed)


def _any_perturbed(value: Any) -> bool:
    leaves = jax.tree.leaves(value, is_leaf=_is_custom_vjp_primal)
    return any(leaf.perturbed and jnp.issubdtype(leaf.value.dtype, jnp.inexact) for leaf in leaves)


def _is_custom_vjp_primal(value: Any) -> bool:
    return hasattr(value, "perturbed")


def _zeros_for_symbolic(cotangent: Any) -> Any:
    return jnp.zeros(cotangent.aval.shape, cotangent.aval.dtype) if _is_symbolic_zero(cotangent) else cotangent


def _is_symbolic_zero(value: Any) -> bool:
    return isinstance(value, SymbolicZero)


def _differentiable(plan: CallPlan) -> Callable[[Any], Any]:
    """Returns the function of a record that has the gradient rule."""
    trees = ResidualTrees(MAX_ARRAYS_OF_PAIRS if plan.may_choose_pair else 1)
    function = jax.custom_vjp(functools.partial(_forward_only, plan))
    function.defvjp(
        functools.partial(_forward, plan, trees), functools.partial(_backward, plan, trees), symbolic_zeros=True
    )
    return function


def differentiable_call(plan: CallPlan, record: Any) -> Any:
    """Runs a call of a family so that it can be differentiated.

    Inside of the caller's `shard_map`, arrays that are equal on all devices are marked as varying over the mesh axes of
    the other arrays, so that JAX sums their gradients over the devices.
    """
    record = _compat.as_varying(record, record)
    if not plan.forward_mode:
        return _differentiable(plan)(record)
    if plan.differentiable_twice:
        return _with_reference_derivatives(plan, record)
    return call_in_forward_mode(plan, record)


@dataclasses.dataclass(frozen=True)
class DeviceRun:
    """Computes the records of one device, where the arrays of a call are split over several.

    Attributes:
        plan: Everything that decides how the call runs.
    """

    plan: CallPlan

    def __call__(self, record: Any) -> Any:
        """Returns what `differentiable_call` returns of a record."""
        return differentiable_call(self.plan, record)

    def row_states(
        self, record: Any, output_cotangent: jax.Array | None, final_states_cotangent: jax.Array | None
    ) -> jax.Array | None:
        """Returns `Implementation.row_states` of a record, or None if the implementation that serves it has no such
        function, or if the result is to be differentiated, which JAX cannot do with a kernel.
        """
        if self.plan.differentiable_twice or self.plan.forward_mode:
            return None
        implementation = self.plan.choose_implementation(record, "forward").implementation
        if implementation is None or implementation.row_states is None:
            return None
        function = load_object(implementation.row_states)
        scope = jax.named_scope(f"ejkernel.{self.plan.op.name}.row_states.{implementation.name}")
        with context_of_plan(self.plan), scope:
            return call_without_varying_axes(
                lambda argument: function(*argument), (record, output_cotangent, final_states_cotangent)
            )


def _with_reference_derivatives(plan: CallPlan, record: Any) -> Any:
    """Runs a call in both a `forward_mode` and a `second_derivatives` block, differentiable in any mode, any number of
    times.
    """

    def run(record: Any) -> ForwardResults:
        return plan.forward(record)._replace(private_residuals=None)

    results = forward_pass(plan.op.family, run, record)
    return (results.output, results.residuals.lse) if plan.returns_lse else results.output
