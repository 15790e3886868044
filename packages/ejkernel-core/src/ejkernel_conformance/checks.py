"""The checks, one function each: they raise `AssertionError` for an implementation that is wrong on a case.

They run the implementation whatever dispatch thinks of the case; `subjects.refusal` says whether it may be run. A
backend's own tests may call them with cases of their own:

    checks.check_value(Subject(op=op, implementation=implementation, case=case))
"""

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.ops.call import decide
from ejkernel.ops.config.chain import ConfigSelectorChain
from ejkernel.ops.grad import CallPlan
from ejkernel.ops.model import Op
from ejkernel.ops.params import Direction
from ejkernel_conformance import running
from ejkernel_conformance.compare import assert_close, assert_gradients_close, assert_same_bits, assert_same_shapes
from ejkernel_conformance.subjects import Subject, differentiable_fields, inputs, pinned_plan, refusal


def check_value(subject: Subject) -> None:
    """Checks that the output under jit is the reference's."""
    want, _ = running.expected(subject.op, subject.case)
    assert_close(running.forward(subject)(subject.args), want, subject.tolerance, str(subject))


def check_shapes(subject: Subject) -> None:
    """Checks, without running, that output and residuals have the structure, shapes and dtypes of the reference's."""
    op, plan = subject.op, pinned_plan(subject.op, subject.implementation)
    output = jax.eval_shape(running.forward(subject), subject.args)
    assert_same_shapes(output, jax.eval_shape(op.reference, subject.args), f"{subject}, output")
    got = jax.eval_shape(plan.forward, subject.record)
    assert_same_shapes(got.residuals, jax.eval_shape(op.family.reference, subject.record)[1], f"{subject}, residuals")


def check_residuals(subject: Subject) -> None:
    """Checks that the floating residuals are those of the family, since another implementation's backward pass may read
    them.
    """
    plan = pinned_plan(subject.op, subject.implementation)
    if not _floating(jax.eval_shape(subject.op.family.reference, subject.record)[1]):
        return  # `check_shapes` has seen that there are none on the other side either
    got = jax.jit(lambda record: plan.forward(record).residuals)(subject.record)
    _, want = running.family_answer(subject.op, subject.case)
    # Integer residuals are indices, of which rounding may pick either of two that are nearly alike.
    assert_close(_floating(got), _floating(want), subject.tolerance, f"{subject}, residuals")


def check_eager(subject: Subject) -> None:
    """Checks that the public function with `platform=` returns the same result outside of jit as under jit."""
    op, platform = subject.op, subject.implementation.platform
    served = decide(op, subject.args, platform=platform).forward.implementation
    if served is not None and served.name == subject.implementation.name:
        positional, keywords = public_arguments(op, subject.args)
        got = op.function(*positional, **keywords, platform=platform)
    else:  # another implementation of the same toolchain comes first, so there is no public way to this one
        got = running.call(pinned_plan(op, subject.implementation), subject.args)
    assert_close(got, running.forward(subject)(subject.args), subject.tolerance, f"{subject}, eager")


def public_arguments(op: Op, args: Any) -> tuple[list[Any], dict[str, Any]]:
    """Returns the arguments with which the public function builds the given record."""
    given = {field.name: getattr(args, field.name) for field in dataclasses.fields(args)}
    kinds = {name: parameter.kind for name, parameter in op.signature.parameters.items()}
    positional = [given.pop(name) for name in tuple(given) if kinds[name] is inspect.Parameter.POSITIONAL_ONLY]
    return positional, given


def check_gradients(subject: Subject) -> None:
    """Checks that the gradients of every floating argument are those of the differentiated reference."""
    cotangent = running.cotangent(subject.op, subject.case)
    _, got = running.forward_and_backward(subject)(subject.args, cotangent)
    _, want = running.expected(subject.op, subject.case)
    assert_gradients_close(got, want, subject.tolerance, str(subject))


def check_forward_mode(subject: Subject) -> None:
    """Checks output and tangents of a call in a `forward_mode` block against those of the reference under `jax.jvp`."""
    op, names = subject.op, running.differentiable_inputs(subject.op, subject.case)
    plan = dataclasses.replace(pinned_plan(op, subject.implementation), forward_mode=True)
    tangents = running.normal_like({name: running.leaves_by_name(subject.args)[name] for name in names})
    got = jax.jit(running.with_tangents(lambda args: running.call(plan, args)))(subject.args, tangents)
    want = running.on_cpu(running.with_tangents(op.reference))(subject.args, tangents)
    assert_close(got, want, subject.tolerance, f"{subject}, forward mode")


def check_vmap(subject: Subject, *, integers_shared: bool = False) -> None:
    """Checks that outputs and gradients under `jax.vmap` over two inputs of a case are those of the reference for each
    input.

    Args:
        subject: Implementation and case.
        integers_shared: Arrays of integers and booleans are not mapped: both inputs have those of the first.
    """
    _check_mapped(subject, "vmap", jax.vmap, integers_shared=integers_shared)


def check_loop(subject: Subject) -> None:
    """Checks the outputs and gradients of a loop over two inputs, whose arrays are slices of longer arrays."""
    _check_mapped(subject, "in a loop", lambda call: lambda *arrays: jax.lax.map(lambda each: call(*each), arrays))


def _check_mapped(
    subject: Subject, what: str, mapping: Callable[[Callable[..., Any]], Any], *, integers_shared: bool = False
) -> None:
    op, case = subject.op, subject.case
    every = [running.leaves_by_name(inputs(case, seed)) for seed in (0, 1)]
    names = [name for name, leaf in every[0].items() if running.is_floating(leaf) or not integers_shared]
    mapped = [{name: leaves[name] for name in names} for leaves in every]
    cotangents = [running.cotangent(op, case, seed) for seed in (0, 1)]

    def args(some: Any) -> Any:
        return jax.tree.unflatten(jax.tree.structure(subject.args), list((every[0] | some).values()))

    want = [
        running.reference(op, case)(args(some), cotangent) for some, cotangent in zip(mapped, cotangents, strict=True)
    ]
    output, gradients = _stacked(*want)
    if differentiable_fields(op.family, subject.record) and not refusal(subject, "backward"):
        both = mapping(lambda some, cotangent: running.forward_and_backward(subject)(args(some), cotangent))
        got, pulled = jax.jit(both)(_stacked(*mapped), _stacked(*cotangents))
        assert_gradients_close(pulled, gradients, subject.tolerance, f"{subject}, {what}")
    else:
        got = jax.jit(mapping(lambda some: running.forward(subject)(args(some))))(_stacked(*mapped))
    assert_close(got, output, subject.tolerance, f"{subject}, {what}")


def check_determinism(subject: Subject) -> None:
    """Checks that two runs give the same output, bit by bit."""
    run = running.forward(subject)
    assert_same_bits(run(subject.args), run(subject.args), str(subject))


def check_gradient_determinism(subject: Subject) -> None:
    """Checks that two runs give the same gradients, bit by bit."""
    run, cotangent = running.forward_and_backward(subject), running.cotangent(subject.op, subject.case)
    assert_same_bits(run(subject.args, cotangent), run(subject.args, cotangent), str(subject))


def check_candidate(subject: Subject, direction: Direction, part: Any) -> None:
    """Checks that the result with a configuration of one direction is the reference's."""
    op = subject.op
    plan = _with_part(subject, direction, part)
    output, gradients = running.expected(op, subject.case)
    if direction == "forward":
        got = jax.jit(lambda args: running.call(plan, args))(subject.args)
        assert_close(got, output, subject.tolerance, f"{subject} with {part}")
        return
    names = running.differentiable_inputs(op, subject.case)
    run = jax.jit(running.with_gradients(lambda args: running.call(plan, args), names))
    _, got = run(subject.args, running.cotangent(op, subject.case))
    assert_gradients_close(got, gradients, subject.tolerance, f"{subject} with {part}")


def _with_part(subject: Subject, direction: Direction, part: Any) -> CallPlan:
    """Returns a plan of which the implementation gets a configuration part of one direction.

    The public configuration need not have all of the kernel's fields: its own part is put where measured ones are.
    """
    plan = dataclasses.replace(pinned_plan(subject.op, subject.implementation), chain=ConfigSelectorChain())
    choice = plan.choose_implementation(subject.record, direction if direction == "backward" else "forward")
    plan.chain.cache.put(dataclasses.replace(plan.request(choice, subject.record), direction=direction).key(), part)
    return plan


def _floating(tree: Any) -> list[Any]:
    return [x for x in jax.tree.leaves(tree) if jnp.issubdtype(x.dtype, jnp.inexact)]


def _stacked(*trees: Any) -> Any:
    return jax.tree.map(lambda *leaves: np.stack(leaves), *trees)
