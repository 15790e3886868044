"""Forward mode: the tangents of a call, and their transpose.

A call in a `forward_mode` block is a `jax.custom_jvp` whose rule is one primitive:

    results_and_tangents   record, tangents -> results and their tangents     in one pass

`jax.jvp` runs this primitive. Under `jax.linearize`, and so under `jax.grad`, the record is known and the tangents are
not: partial evaluation then splits it into the forward pass of the chosen kernel and a second primitive:

    linear                 record, results, tangents -> tangents of results   its transpose is the chosen backward pass

The tangent L(x; v) of a call can be differentiated in x. Its derivative along u is D2 f(x)[v, u], which is symmetric in
v and u, so the transpose in u is the derivative of the backward pass along v: `SecondOrder`. Reverse over forward
therefore never runs reverse mode through a loop of XLA or through a kernel.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero

from ejkernel.errors import NoImplementationError
from ejkernel.ops.checkpoint_names import name_results
from ejkernel.ops.dispatch import Choice, with_first_chosen
from ejkernel.ops.linear_maps import FirstOrder, Leaves, SecondOrder, is_floating, replace_leaves
from ejkernel.ops.model import Implementation
from ejkernel.ops.second import run_refusing_derivatives
from ejkernel.promotion import with_standard_promotion
from ejkernel.types.forward_mode import forward_mode
from ejkernel.types.pullback import ForwardResults, Pullback


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def forward_results(plan: Any, fields: frozenset[str], record: Any) -> ForwardResults:
    """Returns the results of a forward pass, differentiable in forward mode.

    Args:
        plan: The `CallPlan`.
        fields: Record fields whose gradient a backward pass will compute; empty if no backward pass follows.
        record: The family record.
    """
    if not fields:
        return plan.forward(record)._replace(private_residuals=None)
    choice = plan.choice_with_config(plan.choose_both_passes(record, fields)[0], record)
    # Not in `tracing_differentiated_call`: residuals must be those of the forward pass alone, of which `_results_jvp`
    # takes the shapes and the tangents.
    return name_results(plan.forward(record, choice))


@with_standard_promotion
def _results_jvp(
    plan: Any, fields: frozenset[str], primals: tuple[Any], tangents: tuple[Any]
) -> tuple[ForwardResults, ForwardResults]:
    (record,), (record_tangents,) = primals, tangents
    xs, structure = jax.tree.flatten(record)
    vs = jax.tree.leaves(record_tangents)
    perturbed = tuple(
        i for i, (x, v) in enumerate(zip(xs, vs, strict=True)) if is_floating(x) and not isinstance(v, SymbolicZero)
    )
    call = TangentCall(plan, structure, perturbed)
    _check_fields(plan, call.fields(record))
    call = dataclasses.replace(call, config=_paired_config(plan, record, call.fields(record)))
    shapes = jax.eval_shape(lambda record: plan.forward(record)[:2], record)
    # Pallas comes with `jax.extend`; only forward mode imports it.
    from ejkernel.ops.tangent_primitives import bind_results_and_tangents

    leaves, result_tangents = bind_results_and_tangents(call, xs, [vs[i] for i in perturbed], jax.tree.leaves(shapes))
    results = ForwardResults(*jax.tree.unflatten(jax.tree.structure(shapes), leaves))
    remaining = iter(result_tangents)
    tangents_of_leaves = [next(remaining) if is_floating(x) else _zero_tangent(x) for x in leaves]
    output, residuals = jax.tree.unflatten(jax.tree.structure(shapes), tangents_of_leaves)
    if fields:  # with the private residuals that the backward pass of a paired kernel reads
        results = forward_results(plan, fields, record)
    return results, ForwardResults(output, residuals, jax.tree.map(_zero_tangent, results.private_residuals))


forward_results.defjvp(_results_jvp, symbolic_zeros=True)


@dataclasses.dataclass(frozen=True, eq=False)
class TangentCall:
    """A call whose record has tangents, as functions of flat lists of arrays.

    `xs` are the leaves of the record, and `vs` the tangents of the leaves in `perturbed`. The leaves of results are
    those of output and residuals.

    Attributes:
        plan: The `CallPlan`.
        structure: Tree structure of the record.
        perturbed: Indices of the leaves with tangents.
        config: The configuration of both passes of a paired implementation; None for others.
    """

    plan: Any
    structure: Any
    perturbed: tuple[int, ...]
    config: Any = None

    def with_perturbed(self, perturbed: tuple[int, ...]) -> "TangentCall":
        """Returns the same call with tangents of other leaves."""
        return dataclasses.replace(self, perturbed=perturbed)

    @property
    def without_tangent_batch_axes(self) -> "TangentCall":
        """Returns the call without the batch axes that only tangents have: there is none."""
        return self

    def expand_tangent(self, i: int, u: jax.Array) -> jax.Array:
        """Returns a tangent of leaf i with every batch axis: there is none."""
        return u

    def fields(self, record: Any) -> frozenset[str]:
        """Returns the record fields with tangents."""
        paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(record)]
        return frozenset(paths[i][0].name for i in self.perturbed)

    def forward(self, xs: Leaves) -> ForwardResults:
        """Returns the results of the chosen forward pass, with the residuals of a backward pass."""
        record = jax.tree.unflatten(self.structure, xs)
        return forward_results(self.plan, self.fields(record), record)

    def results_and_tangents(self, xs: Leaves, vs: Leaves) -> tuple[Leaves, Leaves]:
        """Returns the leaves of the results, and the tangents of those that are floating."""
        record = jax.tree.unflatten(self.structure, xs)
        if not vs:
            return jax.tree.leaves(forward_results(self.plan, frozenset(), record)), []
        with forward_mode():
            results, tangents = self._derive(record, vs)
        leaves = jax.tree.leaves(results)
        return leaves, [v for x, v in zip(leaves, jax.tree.leaves(tangents), strict=True) if is_floating(x)]

    def _derive(self, record: Any, vs: Leaves) -> tuple[Any, Any]:
        choice = tangent_choice(self.plan, record, self.fields(record))
        if choice is not None and choice.implementation is not None and choice.implementation.platform != "xla":
            return _kernel_tangents(self, choice, record, vs)
        return self.derive_by(choice, record, vs)

    def derive_by(self, choice: Choice | None, record: Any, vs: Leaves) -> tuple[Any, Any]:
        """Returns results and tangents by a configured choice, or by the family's reference if it is None."""
        if choice is not None and choice.implementation is not None and choice.implementation.forward_mode:
            return self.plan.forward_with_tangents(record, vs, self._tangents_by_field, choice)
        run = self.plan.op.family.reference if choice is None else functools.partial(self.plan.forward, choice=choice)
        xs = jax.tree.leaves(record)
        return jax.jvp(
            lambda perturbed_leaves: tuple(
                run(jax.tree.unflatten(self.structure, replace_leaves(xs, self.perturbed, perturbed_leaves)))[:2]
            ),
            ([xs[i] for i in self.perturbed],),
            (vs,),
        )

    def _tangents_by_field(self, record: Any, vs: Leaves) -> dict[str, Any]:
        leaves = [_zero_tangent(x) for x in jax.tree.leaves(record)]
        tangents = jax.tree.unflatten(self.structure, replace_leaves(leaves, self.perturbed, vs))
        return {name: getattr(tangents, name) for name in sorted(self.fields(record))}

    def linear_map(self, results: ForwardResults) -> FirstOrder:
        """Returns the map from `vs` to the tangents of `results`, which the forward pass has returned."""
        return FirstOrder(self, self.structure.num_leaves, jax.tree.structure(results))

    def second_order(self, perturbed: tuple[int, ...]) -> SecondOrder:
        """Returns the map of second derivatives along `vs` and along tangents of the leaves `perturbed`."""
        return SecondOrder(self, self.structure.num_leaves, perturbed)

    def backward(self, xs: Leaves, results: ForwardResults, cotangents: Leaves) -> Leaves:
        """Returns the gradients of the perturbed leaves.

        Args:
            xs: The leaves of the record.
            results: What `forward` returned.
            cotangents: Of the floating leaves of the results; None for zero.
        """
        plan, record = self.plan, jax.tree.unflatten(self.structure, xs)
        fields = self.fields(record)
        cotangent, lse_cotangent = _split_cotangents(plan, results, cotangents)
        start = Pullback(record=record, cotangent=cotangent, grad_fields=fields, **results._asdict())
        _, backward = plan.choose_both_passes(record, fields)
        if backward.implementation is None:
            raise NoImplementationError(backward)
        backward = plan.choice_with_config(backward, record)
        if self.config is not None:  # of a paired kernel, whose private residuals have its tile sizes
            backward = dataclasses.replace(backward, config=self.config)
        pullback = dataclasses.replace(start, cotangent=cotangent, lse_cotangent=lse_cotangent)
        with forward_mode():
            gradients = _gradients(plan, backward, pullback)
        leaves = self.structure.flatten_up_to(dataclasses.replace(record, **gradients))
        return [leaves[i] for i in self.perturbed]


def tangent_choice(plan: Any, record: Any, fields: frozenset[str]) -> Choice | None:
    """Returns the choice of the forward pass that tangents come from; None for the family's reference.

    This is the first implementation in the order of choice that is compiled by XLA, or declares a `forward_mode`
    function which serves the call: JAX does not differentiate kernels.

    Args:
        plan: The `CallPlan`.
        record: The family record.
        fields: The record fields with tangents.

    Raises:
        NoImplementationError: No implementation serves the call.
    """
    choice = plan.choose_implementation(record, "forward")
    if choice.implementation is None:
        raise NoImplementationError(choice)
    for verdict in choice.verdicts:
        if verdict.status != "refused" and _can_compute_tangents(plan, verdict.implementation, record, fields):
            tangents_from = dataclasses.replace(choice, verdicts=with_first_chosen((verdict,)))
            # The `cfg` of the call is for the kernel that dispatch has chosen.
            if verdict.implementation != choice.implementation:
                plan = dataclasses.replace(plan, cfg=None)
            return plan.choice_with_config(tangents_from, record)
    return _xla_choice(plan, record, "forward", frozenset())


def _can_compute_tangents(plan: Any, implementation: Implementation, record: Any, fields: frozenset[str]) -> bool:
    """Returns whether tangents of the fields can come from an implementation that serves the record."""
    if implementation.platform == "xla":
        return True
    if plan.batch_invariant:  # a kernel with tangents has other tiles, and so other bits
        return False
    return implementation.forward_mode is not None and not any(implementation.forward_mode_limits(record, fields))


def forward_mode_note(plan: Any, record: Any, fields: frozenset[str]) -> str:
    """Returns the sentence of `explain` about where the tangents of a call come from."""
    choice = tangent_choice(plan, record, fields)
    if choice is None or choice.implementation is None:
        return f"forward mode: JAX derives tangents from the reference of {plan.op.family.name}"
    if choice.implementation.forward_mode:
        return f"forward mode: tangents and output by the forward_mode function of {choice.implementation.name}"
    return f"forward mode: JAX derives tangents from the forward pass of {choice.implementation.name}"


def _xla_choice(plan: Any, record: Any, direction: Any, fields: frozenset[str]) -> Choice | None:
    choice = dataclasses.replace(plan, platform="xla", cfg=None).choose(record, direction, fields)
    return None if choice.implementation is None else choice


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _kernel_tangents(call: TangentCall, choice: Any, record: Any, vs: Leaves) -> tuple[Any, Any]:
    return call.derive_by(choice, record, vs)


@_kernel_tangents.defjvp
@with_standard_promotion
def _kernel_tangents_jvp(call: TangentCall, choice: Any, primals: Any, tangents: Any) -> tuple[Any, Any]:
    """Computes second derivatives by XLA: JAX does not differentiate kernels."""
    xla = _xla_choice(call.plan, primals[0], "forward", frozenset())
    derive = functools.partial(call.derive_by, xla)
    return _kernel_tangents(call, choice, *primals), jax.jvp(derive, primals, tangents)[1]


def _gradients(plan: Any, choice: Choice, pullback: Pullback) -> dict[str, Any]:
    """Returns the requested gradients of a backward pass, differentiable in forward mode."""
    assert choice.implementation is not None  # the caller has checked
    if choice.implementation.platform == "xla":
        return _derivable_gradients(plan, choice, pullback)
    return _kernel_gradients(plan, choice, pullback)


def _derivable_gradients(plan: Any, choice: Any, pullback: Pullback) -> dict[str, Any]:
    run = functools.partial(plan.select_gradients, choice)
    return run_refusing_derivatives(plan.op.name, choice.implementation, run, pullback)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _kernel_gradients(plan: Any, choice: Any, pullback: Pullback) -> dict[str, Any]:
    return plan.select_gradients(choice, pullback)


@_kernel_gradients.defjvp
@with_standard_promotion
def _kernel_gradients_jvp(
    plan: Any, choice: Any, primals: tuple[Pullback], tangents: tuple[Pullback]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Computes tangents by XLA's backward pass, which does not need a kernel's private residuals."""
    (pullback,), (pullback_tangents,) = primals, tangents
    xla = _xla_choice(plan, pullback.record, "backward", pullback.grad_fields)
    if xla is None:
        name = choice.implementation.name
        raise NotImplementedError(f"{plan.op.name} has no second derivative by {name}, and none by XLA")
    primal, direction = (dataclasses.replace(each, private_residuals=None) for each in (pullback, pullback_tangents))
    run = functools.partial(_derivable_gradients, plan, xla)
    return _kernel_gradients(plan, choice, pullback), jax.jvp(run, (primal,), (direction,))[1]


def _split_cotangents(plan: Any, results: ForwardResults, cotangents: Leaves) -> tuple[Any, Any]:
    """Returns the cotangents of output and lse from those of all floating leaves of output and residuals.

    Raises:
        NotImplementedError: Another residual has a cotangent, which only happens in third derivatives.
    """
    remaining = iter(cotangents)
    tree = (results.output, results.residuals)
    tangents_of_leaves = [next(remaining) if is_floating(x) else None for x in jax.tree.leaves(tree)]
    count = len(jax.tree.leaves(results.output))
    output = [
        x if x is not None else (jnp.zeros_like(leaf) if is_floating(leaf) else _zero_tangent(leaf))
        for x, leaf in zip(tangents_of_leaves[:count], jax.tree.leaves(results.output), strict=True)
    ]
    paths = jax.tree_util.tree_leaves_with_path(results.residuals)
    residuals = {jax.tree_util.keystr(path): x for (path, _), x in zip(paths, tangents_of_leaves[count:], strict=True)}
    lse = residuals.pop(".lse", None) if plan.returns_lse else None
    if any(x is not None for x in residuals.values()):
        raise NotImplementedError(f"{plan.op.name}: this derivative needs a `second_derivatives` block too")
    return jax.tree.unflatten(jax.tree.structure(results.output), output), lse


def _paired_config(plan: Any, record: Any, fields: frozenset[str]) -> Any:
    """Returns the configuration that both passes of a paired implementation share; None if it is not paired."""
    choice, _ = plan.choose_both_passes(record, fields)
    if choice.implementation is None or not choice.implementation.paired:
        return None
    return plan.choice_with_config(choice, record).config


def _check_fields(plan: Any, fields: frozenset[str]) -> None:
    undefined = sorted(fields - set(plan.op.family.differentiable))
    if undefined:
        raise NotImplementedError(f"{plan.op.name} has no derivative with respect to {', '.join(undefined)}")


def _zero_tangent(x: Any) -> Any:
    return jnp.zeros_like(x) if is_floating(x) else np.zeros(x.shape, jax.dtypes.float0)


def call_in_forward_mode(plan: Any, record: Any) -> Any:
    """Runs a call of a family so that it can be differentiated in forward mode, and once in reverse mode."""
    results = forward_results(plan, frozenset(), record)
    return (results.output, results.residuals.lse) if plan.returns_lse else results.output
