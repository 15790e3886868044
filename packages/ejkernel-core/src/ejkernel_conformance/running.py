"""Running subjects and references, compiled once a case."""

import dataclasses
import functools
import re
import weakref
from collections.abc import Callable, Container
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.ops.grad import CallPlan, differentiable_call
from ejkernel.ops.model import Case, Op
from ejkernel.types.arguments import array_fields
from ejkernel_conformance.subjects import Subject, differentiable_fields, inputs, lowered, pinned_plan

# Tests of a case run next to each other, so few compiled functions are needed at a time. What the reference says is
# small, and asked for again by the tests of gradients.
KEPT = 16
KEPT_ANSWERS = 1024

Gradients = dict[str, jax.Array]


def call(plan: CallPlan, args: Any) -> Any:
    """Returns what the public function does with an argument record, with the given plan."""
    plan.op.validate(args)
    plan = dataclasses.replace(plan, returns_lse=plan.op.returns_residual_lse(args))
    return plan.op.finish(args, differentiable_call(plan, plan.op.lower(args)))


def with_gradients(function: Callable[[Any], Any], names: tuple[str, ...]) -> Callable[[Any, Any], Any]:
    """Returns a function (inputs, cotangent) -> (output, gradients by name), for the named leaves of the inputs."""

    def both(tree: Any, cotangent: Any) -> tuple[Any, Gradients]:
        leaves, structure = leaves_by_name(tree), jax.tree.structure(tree)

        def moved(some: Gradients) -> Any:
            return function(jax.tree.unflatten(structure, list((leaves | some).values())))

        output, pull = jax.vjp(moved, {name: leaves[name] for name in names})
        return output, pull(jax.tree.map(_tangent_like, output, cotangent))[0]

    return both


def with_tangents(function: Callable[[Any], Any]) -> Callable[[Any, Gradients], tuple[Any, Any]]:
    """Returns a function (inputs, tangents by name) -> (output, tangents of its floating arrays)."""

    def both(tree: Any, tangents: Gradients) -> tuple[Any, Any]:
        leaves, structure = leaves_by_name(tree), jax.tree.structure(tree)

        def moved(some: Gradients) -> Any:
            return function(jax.tree.unflatten(structure, list((leaves | some).values())))

        output, changes = jax.jvp(moved, ({name: leaves[name] for name in tangents},), (tangents,))
        pairs = zip(jax.tree.leaves(output), jax.tree.leaves(changes), strict=True)
        return output, [change for x, change in pairs if is_floating(x)]

    return both


def _tangent_like(x: jax.Array, cotangent: jax.Array) -> Any:
    """Returns the cotangent; of integers the one that JAX has for them."""
    return cotangent if is_floating(x) else np.zeros(x.shape, jax.dtypes.float0)


def leaves_by_name(tree: Any) -> dict[str, Any]:
    """Returns the leaves of a record in order, by their path: `{"query": ..., "mask_info.q_positions": ...}`."""
    found = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path).lstrip("."): leaf for path, leaf in found}


asked_for_both: weakref.WeakSet[Subject] = weakref.WeakSet()
"""The subjects whose output and whose gradients a run of the suite asks for: one program computes both."""

requests_asked_for_both: weakref.WeakSet[Subject] = weakref.WeakSet()
"""The subjects whose requests and whose gradients of requests a run asks for: one program computes both."""


@functools.lru_cache(maxsize=KEPT)
def forward(subject: Subject) -> Callable[[Any], Any]:
    """Returns the compiled operation: args -> output."""
    if subject in asked_for_both:
        run, given = _together(subject), cotangent(subject.op, subject.case)
        return lambda args: run(args, given)[0]
    plan = pinned_plan(subject.op, subject.implementation)
    return jax.jit(lambda args: call(plan, args))


@functools.lru_cache(maxsize=KEPT)
def forward_and_backward(subject: Subject) -> Callable[[Any, Any], tuple[Any, Gradients]]:
    """Returns the compiled operation with its gradients: (args, cotangent) -> (output, gradients)."""
    if subject in asked_for_both:
        run = _together(subject)
        return lambda args, cotangent: run(args, cotangent)[1]
    return jax.jit(_differentiated(subject))


@functools.lru_cache(maxsize=KEPT)
def _together(subject: Subject) -> Callable[[Any, Any], tuple[Any, tuple[Any, Gradients]]]:
    """Returns a program of a call that is not differentiated, and of one that is."""
    plan, differentiated = pinned_plan(subject.op, subject.implementation), _differentiated(subject)
    return jax.jit(lambda args, cotangent: (call(plan, args), differentiated(args, cotangent)))


def _differentiated(subject: Subject) -> Callable[[Any, Any], tuple[Any, Gradients]]:
    plan, names = pinned_plan(subject.op, subject.implementation), differentiable_inputs(subject.op, subject.case)
    return with_gradients(lambda args: call(plan, args), names)


@functools.lru_cache(maxsize=KEPT)
def on_records(subject: Subject, isolates: bool = False) -> Callable[[Any], Any]:
    """Returns the compiled family call: record -> output; `isolates` makes it under `isolate_sequences`."""
    if isolates and subject in requests_asked_for_both:
        run, given = _together_on_records(subject), record_cotangent(subject)
        return lambda record: run(record, given)[0]
    plan = dataclasses.replace(pinned_plan(subject.op, subject.implementation), isolates_sequences=isolates)
    return jax.jit(lambda record: differentiable_call(plan, record))


@functools.lru_cache(maxsize=KEPT)
def on_records_with_gradients(subject: Subject, isolates: bool = False) -> Callable[[Any, Any], tuple[Any, Gradients]]:
    """Returns the compiled family call: (record, cotangent) -> (output, gradients)."""
    if isolates and subject in requests_asked_for_both:
        run = _together_on_records(subject)
        return lambda record, cotangent: run(record, cotangent)[1]
    return jax.jit(_differentiated_on_records(subject, isolates)[1])


@functools.lru_cache(maxsize=KEPT)
def _together_on_records(subject: Subject) -> Callable[[Any, Any], tuple[Any, tuple[Any, Gradients]]]:
    """Returns a program of a family call under `isolate_sequences` that is not differentiated, and of one that is."""
    call, differentiated = _differentiated_on_records(subject, isolates=True)
    return jax.jit(lambda record, cotangent: (call(record), differentiated(record, cotangent)))


def _differentiated_on_records(subject: Subject, isolates: bool) -> tuple[Callable[..., Any], Callable[..., Any]]:
    plan = dataclasses.replace(pinned_plan(subject.op, subject.implementation), isolates_sequences=isolates)

    def call(record: Any) -> Any:
        return differentiable_call(plan, record)

    return call, with_gradients(call, _differentiable_leaves(subject))


@functools.lru_cache(maxsize=KEPT)
def record_cotangent(subject: Subject) -> Any:
    """Returns a normal cotangent of the output of a case's record."""
    return normal_like(jax.eval_shape(subject.op.family.reference, subject.record)[0])


def _differentiable_leaves(subject: Subject) -> tuple[str, ...]:
    """Returns the paths of the floating arrays in the record fields that have a gradient."""
    fields = differentiable_fields(subject.op.family, subject.record)
    leaves = leaves_by_name(subject.record)
    return tuple(sorted(path for path, x in leaves.items() if is_floating(x) and re.split(r"[.[]", path)[0] in fields))


def on_cpu(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compiles a function for the CPU; its results are NumPy arrays.

    What implementations are compared with is computed there: XLA's compiler for GPUs has got references wrong (JAX 0.12
    adds the two products of `flash_mla`'s latent gradient wrongly), and a fault that implementation and reference share
    would go unseen. Where a process has no CPU backend the function runs on the default device.
    """
    compiled = jax.jit(function)
    try:
        cpu = jax.local_devices(backend="cpu")[0]
    except RuntimeError:
        return compiled

    def run(*args: Any) -> Any:
        with jax.default_device(cpu):
            return jax.tree.map(np.asarray, compiled(*jax.device_put(args, cpu)))

    return run


@functools.lru_cache(maxsize=KEPT)
def reference(op: Op, case: Case) -> Callable[[Any, Any], tuple[Any, Gradients]]:
    """Returns the compiled reference with its gradients: (args, cotangent) -> (output, gradients)."""
    return on_cpu(with_gradients(op.reference, differentiable_inputs(op, case)))


@functools.lru_cache(maxsize=KEPT_ANSWERS)
def expected(op: Op, case: Case, seed: int = 0) -> tuple[Any, Gradients]:
    """Returns the reference's output and, by autodiff, its gradients."""
    return reference(op, case)(inputs(case, seed), cotangent(op, case, seed))


@functools.lru_cache(maxsize=KEPT_ANSWERS)
def family_answer(op: Op, case: Case) -> tuple[Any, Any]:
    """Returns the output and the residuals of the family's reference on the case's record."""
    return on_cpu(op.family.reference)(lowered(op, case))


@functools.lru_cache(maxsize=KEPT)
def cotangent(op: Op, case: Case, seed: int = 0) -> Any:
    """Returns a normal cotangent of a case's output."""
    return normal_like(jax.eval_shape(op.reference, inputs(case, seed)), seed)


def normal_like(shapes: Any, seed: int = 0) -> Any:
    """Returns normal arrays of the given shapes, in any pytree."""
    # NumPy's, for which nothing is compiled.
    random = np.random.default_rng(1000 + seed)
    return jax.tree.map(lambda x: random.standard_normal(x.shape, np.float32).astype(x.dtype), shapes)


@functools.lru_cache(maxsize=KEPT)
def differentiable_inputs(op: Op, case: Case) -> tuple[str, ...]:
    """Names of the floating arguments that can be differentiated: they reach no record field without a gradient.

    Arguments without elements are left out: whether they reach a field cannot be seen.
    """
    args = inputs(case, 0)
    floating = {name: x for name, x in leaves_by_name(args).items() if is_floating(x) and x.size}
    fields = array_fields(jax.eval_shape(op.lower, args))
    closed = {name for name, x in fields.items() if is_floating(x)} - set(op.family.differentiable)
    if not closed:
        return tuple(floating)
    reached = jax.jit(lambda args: {name: _reached(op, args, name, closed) for name in floating})(args)
    return tuple(name for name, fields in reached.items() if not any(fields.values()))


def is_floating(value: Any) -> bool:
    """Returns whether an array, or one of a tree's, is of floating numbers."""
    return any(jnp.issubdtype(jnp.result_type(leaf), jnp.inexact) for leaf in jax.tree.leaves(value))


def _reached(op: Op, args: Any, name: str, fields: Container[str]) -> dict[str, jax.Array]:
    """Returns which of some record fields change with one argument."""
    leaves, structure = leaves_by_name(args), jax.tree.structure(args)

    def record_with(value: Any) -> dict[str, Any]:
        found = array_fields(op.lower(jax.tree.unflatten(structure, list((leaves | {name: value}).values()))))
        return {field: x for field, x in found.items() if field in fields}

    _, tangents = jax.jvp(record_with, (leaves[name],), (jnp.ones_like(leaves[name]),))
    return {
        field: jnp.any(jnp.array([jnp.any(leaf != 0) for leaf in jax.tree.leaves(x)])) for field, x in tangents.items()
    }
