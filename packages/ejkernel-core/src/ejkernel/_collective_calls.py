"""Calls with collectives inside of the caller's `shard_map`, as one primitive.

A kernel is called without the mesh axes that its arrays vary over. JAX traces functions again when it batches,
scans or checkpoints them, and then refuses a collective of an array that does not vary over the collective's axis. A
call with collectives is therefore one primitive, whose rules trace the call without that check.
"""

import functools
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel import _compat


@contextmanager
def without_check_of_varying_axes() -> Generator[None]:
    """Lets a block trace operations without the check of the mesh axes that arrays vary over."""
    from jax._src import config

    settings: Any = config
    with settings._check_vma(False):
        yield


def without_varying_axes(tree: Any) -> Any:
    """Returns the arrays of a tree as ones that vary over no axis, in a block of `without_check_of_varying_axes`."""
    # Where no check runs, the result of an operation varies over no axis; these two operations cost nothing.
    return jax.tree.map(lambda x: jax.lax.squeeze(jax.lax.expand_dims(x, (0,)), (0,)), tree)


def call_without_varying_axes(call: Callable[[Any], Any], argument: Any) -> Any:
    """Returns what a function makes of a tree of arrays, told nothing of the mesh axes that they vary over; its results
    do.

    Kernels are opaque to `shard_map`'s inference of what varies, and loops in them mix arrays that do and do not.
    """
    if not any(map(_compat.varying_axes, jax.tree.leaves(argument))):
        return call(argument)
    # JAX evaluates traced operations again when it differentiates, and then checks; a jitted function stays whole.
    jitted = jax.jit(call)
    with without_check_of_varying_axes():
        plain = without_varying_axes(argument)
        traced = jitted.trace(plain)
        results = None if _has_collectives(traced.jaxpr) else jitted(plain)
    if results is not None:
        return _compat.as_varying(results, argument)
    leaves = _primitive().bind(*jax.tree.leaves(argument), program=traced.jaxpr)
    return jax.tree.unflatten(jax.tree.structure(traced.out_info), leaves)


def _has_collectives(program: Any, axis: Any = None) -> bool:
    """Returns whether a traced function reads a named axis: any, or the given one."""
    from jax._src.core import NamedAxisEffect

    names = [effect.name for effect in program.effects if isinstance(effect, NamedAxisEffect)]
    return bool(names) if axis is None else axis in names


@functools.cache
def _primitive() -> Any:
    from jax.extend.core import Primitive
    from jax.interpreters import ad, batching, mlir

    primitive: Any = Primitive("ejkernel_collective_call")
    primitive.multiple_results = True
    primitive.def_impl(_run)
    primitive.def_effectful_abstract_eval(_abstract_results)
    mlir.register_lowering(primitive, mlir.lower_fun(_run, multiple_results=True))
    ad.primitive_jvps[primitive] = _tangents
    batching.fancy_primitive_batchers[primitive] = _batch
    return primitive


def _run(*arrays: Any, program: Any) -> list[Any]:
    with without_check_of_varying_axes():
        return jax.jit(_function(program))(*without_varying_axes(arrays))


def _function(program: Any) -> Callable[..., list[Any]]:
    from jax.extend.core import jaxpr_as_fun

    return jaxpr_as_fun(program)


def _abstract_results(*avals: Any, program: Any) -> tuple[list[Any], Any]:
    results = [_compat.aval_varying_like(x.shape, x.dtype, avals) for x in program.out_avals]
    return results, program.effects


def _bind(function: Callable[..., list[Any]], arrays: Sequence[Any]) -> list[Any]:
    """Returns the results of a function of arrays, which is traced without the check."""
    with without_check_of_varying_axes():
        program = jax.jit(function).trace(*without_varying_axes(list(arrays))).jaxpr
    return _primitive().bind(*arrays, program=program)


def _batch(axis: Any, arrays: Sequence[Any], dims: Sequence[Any], *, program: Any) -> tuple[list[Any], list[Any]]:
    if all(dim is None for dim in dims) and not _has_collectives(program, axis.name):
        results = _primitive().bind(*arrays, program=program)
        return results, [None] * len(results)
    # The collectives may be over the axis of `jax.vmap`.
    batched = jax.vmap(_function(program), in_axes=tuple(dims), axis_name=axis.name, axis_size=axis.size)
    results = _bind(batched, arrays)
    return results, [0] * len(results)


def _tangents(primals: Sequence[Any], tangents: Sequence[Any], *, program: Any) -> tuple[list[Any], list[Any]]:
    from jax.interpreters import ad

    results = _primitive().bind(*primals, program=program)
    moved = [i for i, tangent in enumerate(tangents) if not isinstance(tangent, ad.Zero)]
    floating = [i for i, x in enumerate(results) if jnp.issubdtype(x.dtype, jnp.inexact)]

    def derivative(*arrays: Any) -> list[Any]:
        xs = arrays[: len(primals)]

        def of_moved(*values: Any) -> list[Any]:
            replaced = dict(zip(moved, values, strict=True))
            outputs = _function(program)(*(replaced.get(i, x) for i, x in enumerate(xs)))
            return [outputs[i] for i in floating]

        return jax.jvp(of_moved, tuple(xs[i] for i in moved), arrays[len(primals) :])[1]

    along = dict(zip(floating, _bind(derivative, [*primals, *(tangents[i] for i in moved)]), strict=True))
    zeros = [ad.Zero(jax.typeof(x).to_tangent_aval()) for x in results]
    return results, [along.get(i, zero) for i, zero in enumerate(zeros)]
