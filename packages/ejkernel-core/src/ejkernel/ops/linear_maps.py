"""The two primitives of forward mode: results with their tangents, and linear maps that know their transposes."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive, Var
from jax.interpreters import ad, batching, mlir
from jax.interpreters import partial_eval as pe

from ejkernel import _compat

Leaves = list[Any]


class Call(Protocol):
    """A call with tangents, as `ejkernel.ops.tangents.TangentCall` describes it."""

    moved: tuple[int, ...]

    def with_moved(self, moved: tuple[int, ...]) -> "Call": ...
    def forward(self, xs: Leaves) -> Any: ...
    def results_and_tangents(self, xs: Leaves, vs: Leaves) -> tuple[Leaves, Leaves]: ...
    def backward(self, xs: Leaves, results: Any, cotangents: Leaves) -> Leaves: ...
    def linear_map(self, results: Any) -> Any: ...
    def second_order(self, moved: tuple[int, ...]) -> Any: ...


def is_floating(x: Any) -> bool:
    """Returns whether an array has tangents."""
    return jnp.issubdtype(x.dtype, jnp.inexact)


def replaced(xs: Leaves, moved: Sequence[int], some: Leaves) -> Leaves:
    """Returns the leaves with those at the given indices replaced."""
    result = list(xs)
    for i, x in zip(moved, some, strict=True):
        result[i] = x
    return result


@dataclasses.dataclass(frozen=True, eq=False)
class FirstOrder:
    """The tangents of a call, linear in those of its record. Residuals: leaves of the record, then of the results.

    Attributes:
        call: The call.
        count: Leaves of the record.
        structure: Tree structure of the results.
    """

    call: Call
    count: int
    structure: Any

    @property
    def moved(self) -> tuple[int, ...]:
        """Returns the indices of the leaves that the linear arguments are tangents of."""
        return self.call.moved

    def apply(self, residuals: Leaves, vs: Leaves) -> Leaves:
        """Returns the tangents of the floating leaves of the results."""
        return self.call.results_and_tangents(residuals[: self.count], vs)[1]

    def transposed(self, residuals: Leaves, cotangents: Leaves) -> Leaves:
        """Returns the gradients; a cotangent of zero is None."""
        results = jax.tree.unflatten(self.structure, residuals[self.count :])
        return self.call.backward(residuals[: self.count], results, cotangents)

    def derivative(self, moved: tuple[int, ...]) -> "SecondOrder":
        """Returns the derivative in the given leaves of the record."""
        return SecondOrder(self.call, self.count, moved)


@dataclasses.dataclass(frozen=True, eq=False)
class SecondOrder:
    """The derivative of `FirstOrder` in leaves of the record, linear in their tangents `us`.

    Residuals: leaves of the record, then the tangents `vs` of `FirstOrder`.

    Attributes:
        call: The call.
        count: Leaves of the record.
        moved: Indices of the leaves.
    """

    call: Call
    count: int
    moved: tuple[int, ...]

    def apply(self, residuals: Leaves, us: Leaves) -> Leaves:
        """Returns the second derivatives along `vs` and `us`."""
        xs, vs = residuals[: self.count], residuals[self.count :]

        def tangents(some: Leaves) -> Leaves:
            return self.call.results_and_tangents(replaced(xs, self.moved, some), vs)[1]

        return jax.jvp(tangents, ([xs[i] for i in self.moved],), (us,))[1]

    def transposed(self, residuals: Leaves, cotangents: Leaves) -> Leaves:
        """Returns the derivative along `vs` of the gradients in the moved leaves."""
        xs, vs = residuals[: self.count], residuals[self.count :]
        call = self.call.with_moved(self.moved)

        def gradients(some: Leaves) -> Leaves:
            at = replaced(xs, self.call.moved, some)
            return call.backward(at, call.forward(at), cotangents)

        return jax.jvp(gradients, ([xs[i] for i in self.call.moved],), (vs,))[1]

    def derivative(self, moved: tuple[int, ...]) -> Any:
        """Raises NotImplementedError: third derivatives are those of the reference."""
        raise NotImplementedError("third derivatives in a `forward_mode` block need a `second_derivatives` block too")


@dataclasses.dataclass(frozen=True, eq=False)
class BatchedMap:
    """A linear map under `jax.vmap`: linear arguments and results have a batch axis first, and so have some residuals.

    Attributes:
        map: The map.
        mapped: Which residuals have the axis.
    """

    map: Any
    mapped: tuple[bool, ...]

    @property
    def count(self) -> int:
        """Returns the number of leaves of the record."""
        return self.map.count

    @property
    def _axes(self) -> list[int | None]:
        return [0 if mapped else None for mapped in self.mapped]

    def apply(self, residuals: Leaves, vs: Leaves) -> Leaves:
        """Returns the map's results for every element of the batch."""
        return jax.vmap(self.map.apply, in_axes=(self._axes, 0))(residuals, vs)

    def transposed(self, residuals: Leaves, cotangents: Leaves) -> Leaves:
        """Returns the transposed map's results for every element of the batch."""
        return jax.vmap(self.map.transposed, in_axes=(self._axes, 0))(residuals, cotangents)

    def derivative(self, moved: tuple[int, ...]) -> "BatchedMap":
        """Returns the batch of derivatives; the linear arguments are residuals there."""
        derivative = self.map.derivative(moved)
        return BatchedMap(derivative, (*self.mapped[: self.count], *(True,) * len(self.moved)))

    @property
    def moved(self) -> tuple[int, ...]:
        """Returns the indices of the leaves that the linear arguments are tangents of."""
        return self.map.moved


@dataclasses.dataclass(frozen=True, eq=False)
class BatchedCall:
    """A call under `jax.vmap`: tangents and results have a batch axis first, and so have some leaves of the record.

    Attributes:
        call: The call.
        size: Of the batch.
        mapped: Which leaves have the axis.
    """

    call: Call
    size: int
    mapped: tuple[bool, ...]

    @property
    def moved(self) -> tuple[int, ...]:
        """Returns the indices of the leaves with tangents."""
        return self.call.moved

    @property
    def _axes(self) -> list[int | None]:
        return [0 if mapped else None for mapped in self.mapped]

    def with_moved(self, moved: tuple[int, ...]) -> "BatchedCall":
        """Returns the same call with tangents of other leaves."""
        return dataclasses.replace(self, call=self.call.with_moved(moved))

    def forward(self, xs: Leaves) -> Any:
        """Returns the results of the forward pass, for every element of the batch."""
        return jax.vmap(self.call.forward, in_axes=(self._axes,), axis_size=self.size)(xs)

    def results_and_tangents(self, xs: Leaves, vs: Leaves) -> tuple[Leaves, Leaves]:
        """Returns leaves of the results and their tangents, for every element of the batch."""
        run = jax.vmap(self.call.results_and_tangents, in_axes=(self._axes, 0), axis_size=self.size)
        return run(xs, vs)

    def backward(self, xs: Leaves, results: Any, cotangents: Leaves) -> Leaves:
        """Returns the gradients, for every element of the batch."""
        return jax.vmap(self.call.backward, in_axes=(self._axes, 0, 0))(xs, results, cotangents)

    def linear_map(self, results: Any) -> BatchedMap:
        """Returns the map from tangents to those of the results."""
        leaves = jax.tree.leaves(results)
        return BatchedMap(self.call.linear_map(results), (*self.mapped, *(True,) * len(leaves)))

    def second_order(self, moved: tuple[int, ...]) -> BatchedMap:
        """Returns the map of second derivatives along tangents of `moved` and of the given leaves."""
        return BatchedMap(self.call.second_order(moved), (*self.mapped, *(True,) * len(self.moved)))


_PAIR: Any = Primitive("ejkernel_results_and_tangents")
_PAIR.multiple_results = True
_LINEAR: Any = Primitive("ejkernel_linear")
_LINEAR.multiple_results = True


def bind_results_and_tangents(call: Call, xs: Leaves, vs: Leaves, shapes: Leaves) -> tuple[Leaves, Leaves]:
    """Returns the leaves of a call's results, which have the given shapes, and the tangents of those that are
    floating.
    """
    shapes = _shapes(shapes)
    outputs = _PAIR.bind(*xs, *vs, call=call, count=len(xs), shapes=shapes)
    return outputs[: len(shapes)], outputs[len(shapes) :]


def _bind_linear(linear: Any, residuals: Leaves, vs: Leaves, shapes: Sequence[Any]) -> Leaves:
    return _LINEAR.bind(*residuals, *vs, linear=linear, count=len(residuals), shapes=_shapes(shapes))


def _shapes(values: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in values)


def _run_pair(*args: Any, call: Call, count: int, shapes: Any) -> Leaves:
    results, tangents = call.results_and_tangents(list(args[:count]), list(args[count:]))
    return [*results, *tangents]


def _run_linear(*args: Any, linear: Any, count: int, shapes: Any) -> Leaves:
    return linear.apply(list(args[:count]), list(args[count:]))


def _pair_shapes(*args: Any, call: Call, count: int, shapes: Any) -> Leaves:
    floating = tuple(x for x in shapes if is_floating(x)) if len(args) > count else ()
    return [_compat.aval_varying_like(x.shape, x.dtype, args) for x in (*shapes, *floating)]


def _linear_shapes(*args: Any, linear: Any, count: int, shapes: Any) -> Leaves:
    return [_compat.aval_varying_like(x.shape, x.dtype, args) for x in shapes]


def _pair_jvp(primals: Any, tangents: Any, *, call: Call, count: int, shapes: Any) -> tuple[Leaves, Leaves]:
    xs, vs = list(primals[:count]), list(primals[count:])
    us, ws = tangents[:count], tangents[count:]
    outputs = _PAIR.bind(*primals, call=call, count=count, shapes=shapes)
    floating = [x for x in shapes if is_floating(x)]
    moved = tuple(i for i, u in enumerate(us) if not _is_zero(u))
    changes: list[Any] = [_zero_change(x) for x in outputs]
    terms: list[Leaves] = []
    if moved:
        along = [us[i] for i in moved]
        first, residuals = _linear_map_at(call.with_moved(moved), xs)
        positions = [i for i, x in enumerate(shapes) if is_floating(x)]
        changes = replaced(changes, positions, _bind_linear(first, residuals, along, floating))
        if vs:
            terms.append(_bind_linear(call.second_order(moved), [*xs, *vs], along, floating))
    if not all(map(_is_zero, ws)):
        first, residuals = _linear_map_at(call, xs)
        terms.append(_bind_linear(first, residuals, list(map(ad.instantiate_zeros, ws)), floating))
    for term in terms:
        changes[len(shapes) :] = _sums(changes[len(shapes) :], term)
    return outputs, changes


def _sums(changes: Leaves, terms: Leaves) -> Leaves:
    return [term if _is_zero(change) else change + term for change, term in zip(changes, terms, strict=True)]


def _linear_map_at(call: Call, xs: Leaves) -> tuple[Any, Leaves]:
    """Returns the linear map of a call's tangents, and its residuals."""
    results = call.forward(xs)
    return call.linear_map(results), [*xs, *jax.tree.leaves(results)]


def _linear_jvp(primals: Any, tangents: Any, *, linear: Any, count: int, shapes: Any) -> tuple[Leaves, Leaves]:
    residuals, vs = list(primals[:count]), list(primals[count:])
    us, ws = tangents[: linear.count], tangents[count:]
    outputs = _bind_linear(linear, residuals, vs, shapes)
    moved = tuple(i for i, u in enumerate(us) if not _is_zero(u))
    changes: list[Any] = [_zero_change(x) for x in outputs]
    if not all(map(_is_zero, ws)):
        changes = _bind_linear(linear, residuals, list(map(ad.instantiate_zeros, ws)), shapes)
    if moved or any(not _is_zero(u) for u in tangents[linear.count : count]):
        # The results among the residuals follow from the record, whose derivative has theirs.
        at = [*residuals[: linear.count], *vs]
        terms = _bind_linear(linear.derivative(moved), at, [us[i] for i in moved], shapes)
        changes = _sums(changes, terms)
    return outputs, changes


def _linear_transpose(cotangents: Any, *args: Any, linear: Any, count: int, shapes: Any) -> Leaves:
    given = [None if _is_zero(x) else x for x in cotangents]
    if all(x is None for x in given):
        return [None] * len(args)
    gradients = linear.transposed(list(args[:count]), given)
    asked = [ad.is_undefined_primal(x) for x in args[count:]]
    return [*[None] * count, *(x if wanted else None for x, wanted in zip(gradients, asked, strict=True))]


def _batch_pair(args: Any, dims: Any, *, call: Call, count: int, shapes: Any) -> tuple[Leaves, Leaves]:
    size, moved_args, mapped = _batch_first(args, dims, count)
    shapes = _batched_shapes(shapes, size)
    outputs = _PAIR.bind(*moved_args, call=BatchedCall(call, size, mapped[:count]), count=count, shapes=shapes)
    return outputs, [0] * len(outputs)


def _batch_linear(args: Any, dims: Any, *, linear: Any, count: int, shapes: Any) -> tuple[Leaves, Leaves]:
    size, moved_args, mapped = _batch_first(args, dims, count)
    shapes = _batched_shapes(shapes, size)
    outputs = _LINEAR.bind(*moved_args, linear=BatchedMap(linear, mapped[:count]), count=count, shapes=shapes)
    return outputs, [0] * len(outputs)


def _batch_first(args: Any, dims: Any, count: int) -> tuple[int, Leaves, tuple[bool, ...]]:
    """Returns the size of a batch, the arguments with its axis first, and which have it: those after `count` all do."""
    size = next(x.shape[d] for x, d in zip(args, dims, strict=True) if d is not None)
    mapped = tuple(d is not None for d in dims)
    arguments = [jnp.moveaxis(x, d, 0) if is_mapped else x for x, d, is_mapped in zip(args, dims, mapped, strict=True)]
    tangents = [
        x if is_mapped else jnp.broadcast_to(x, (size, *x.shape))
        for x, is_mapped in zip(arguments[count:], mapped[count:], strict=True)
    ]
    return size, [*arguments[:count], *tangents], mapped


def _batched_shapes(shapes: Any, size: int) -> tuple[Any, ...]:
    return tuple(jax.ShapeDtypeStruct((size, *x.shape), x.dtype) for x in shapes)


def _split_pair(trace: Any, *tracers: Any, call: Call, count: int, shapes: Any) -> Leaves:
    """Splits the primitive where the record is known and tangents are not, as when it is linearised."""
    xs, vs = tracers[:count], tracers[count:]
    if not all(x.is_known() for x in xs) or all(v.is_known() for v in vs):
        params = {"call": call, "count": count, "shapes": shapes}
        return trace.default_process_primitive(_PAIR, tracers, params)
    values = [x.pval.get_known() for x in xs]
    results = call.forward(values)
    residuals = [*values, *jax.tree.leaves(results)]
    params = {
        "linear": call.linear_map(results),
        "count": len(residuals),
        "shapes": tuple(x for x in shapes if is_floating(x)),
    }
    tangents = trace.default_process_primitive(_LINEAR, [*residuals, *vs], params)
    return [*jax.tree.leaves((results.output, results.residuals)), *tangents]


def _split_pair_of_checkpoint(saveable: Any, unknown: Any, instantiated: Any, equation: Any) -> tuple[Any, ...]:
    """Splits the primitive in a function under `jax.checkpoint`, whose forward pass is run again for the gradients."""
    count, outputs = equation.params["count"], len(equation.outvars)
    missing = [x for x, done in zip(equation.invars, instantiated, strict=True) if type(x) is Var and not done]
    if any(unknown[:count]):
        return None, equation, [True] * outputs, [True] * outputs, missing
    results = len(equation.params["shapes"])
    known = equation
    if any(unknown):
        params = {**equation.params, "call": equation.params["call"].with_moved(())}
        known = equation.replace(
            invars=equation.invars[:count], outvars=equation.outvars[:results], params=params
        )
        tangents = [True] * (outputs - results)
    else:
        tangents = [False] * (outputs - results)
    return known, equation, [False] * results + tangents, [True] * outputs, missing


def _zero_change(x: jax.Array) -> Any:
    aval: Any = jax.typeof(x)
    return ad.Zero(aval.to_tangent_aval())


def _is_zero(x: Any) -> bool:
    return isinstance(x, ad.Zero)


for _primitive, _run, _abstract in ((_PAIR, _run_pair, _pair_shapes), (_LINEAR, _run_linear, _linear_shapes)):
    _primitive.def_impl(_run)
    _primitive.def_abstract_eval(_abstract)
    mlir.register_lowering(_primitive, mlir.lower_fun(_run, multiple_results=True))
ad.primitive_jvps[_PAIR] = _pair_jvp
ad.primitive_jvps[_LINEAR] = _linear_jvp
ad.primitive_transposes[_LINEAR] = _linear_transpose
batching.primitive_batchers[_PAIR] = _batch_pair
batching.primitive_batchers[_LINEAR] = _batch_linear
pe.custom_partial_eval_rules[_PAIR] = _split_pair
pe.partial_eval_jaxpr_custom_rules[_PAIR] = _split_pair_of_checkpoint
