"""The two primitives of forward mode: one computes results and tangents, the other is a linear map with a transpose."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive, Var
from jax.interpreters import ad, batching, mlir
from jax.interpreters import partial_eval as pe

from ejkernel import _compat
from ejkernel.ops.linear_maps import BatchedCall, BatchedMap, Call, Leaves, is_floating, replace_leaves

_RESULTS_AND_TANGENTS_P: Any = Primitive("ejkernel_results_and_tangents")
_RESULTS_AND_TANGENTS_P.multiple_results = True
_LINEAR_MAP_P: Any = Primitive("ejkernel_linear")
_LINEAR_MAP_P.multiple_results = True


def bind_results_and_tangents(call: Call, xs: Leaves, vs: Leaves, shapes: Leaves) -> tuple[Leaves, Leaves]:
    """Returns the leaves of a call's results, which have the given shapes, and the tangents of those that are
    floating.
    """
    shape_structs = _shapes(shapes)
    floating = tuple(x for x in shape_structs if is_floating(x))
    outputs = _RESULTS_AND_TANGENTS_P.bind(
        *xs, *vs, call=call, count=len(xs), shapes=shape_structs, tangent_shapes=floating
    )
    return outputs[: len(shapes)], outputs[len(shapes) :]


def _bind_linear(linear: Any, residuals: Leaves, vs: Leaves, shapes: Sequence[Any]) -> Leaves:
    return _LINEAR_MAP_P.bind(*residuals, *vs, linear=linear, count=len(residuals), shapes=_shapes(shapes))


def _shapes(values: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in values)


def _run_results_and_tangents(*args: Any, call: Call, count: int, shapes: Any, tangent_shapes: Any) -> Leaves:
    results, tangents = call.results_and_tangents(list(args[:count]), list(args[count:]))
    return [*results, *tangents]


def _run_linear(*args: Any, linear: Any, count: int, shapes: Any) -> Leaves:
    return linear.apply(list(args[:count]), list(args[count:]))


def _results_and_tangents_shapes(*args: Any, call: Call, count: int, shapes: Any, tangent_shapes: Any) -> Leaves:
    return [_compat.aval_varying_like(x.shape, x.dtype, args) for x in (*shapes, *tangent_shapes)]


def _linear_shapes(*args: Any, linear: Any, count: int, shapes: Any) -> Leaves:
    return [_compat.aval_varying_like(x.shape, x.dtype, args) for x in shapes]


def _results_and_tangents_jvp(primals: Any, tangents: Any, **params: Any) -> tuple[Leaves, Leaves]:
    call, count, shapes, tangent_shapes = (params[name] for name in ("call", "count", "shapes", "tangent_shapes"))
    xs, vs = list(primals[:count]), list(primals[count:])
    us, ws = tangents[:count], tangents[count:]
    outputs = _RESULTS_AND_TANGENTS_P.bind(*primals, **params)
    perturbed = tuple(i for i, u in enumerate(us) if not _is_zero(u))
    output_tangents: list[Any] = [_zero_tangent(x) for x in outputs]
    terms: list[Leaves] = []
    if perturbed:
        positions = [i for i, x in enumerate(shapes) if is_floating(x)]
        results_call = call.without_tangent_batch_axes.with_perturbed(perturbed)
        directions = [results_call.expand_tangent(i, us[i]) for i in perturbed]
        output_tangents = replace_leaves(
            output_tangents, positions, _bind_tangents(results_call, xs, directions, [shapes[i] for i in positions])
        )
    if perturbed and vs:
        directions = [call.expand_tangent(i, us[i]) for i in perturbed]
        terms.append(_bind_linear(call.second_order(perturbed), [*xs, *vs], directions, tangent_shapes))
    if not all(map(_is_zero, ws)):
        terms.append(_bind_tangents(call, xs, list(map(ad.instantiate_zeros, ws)), tangent_shapes))
    for term in terms:
        output_tangents[len(shapes) :] = _add_tangents(output_tangents[len(shapes) :], term)
    return outputs, output_tangents


def _bind_tangents(call: Call, xs: Leaves, vs: Leaves, shapes: Sequence[Any]) -> Leaves:
    """Returns the tangents of a call by the primitive that can be transposed."""
    results = call.forward(xs)
    return _bind_linear(call.linear_map(results), [*xs, *jax.tree.leaves(results)], vs, shapes)


def _add_tangents(output_tangents: Leaves, terms: Leaves) -> Leaves:
    return [term if _is_zero(tangent) else tangent + term for tangent, term in zip(output_tangents, terms, strict=True)]


def _linear_jvp(primals: Any, tangents: Any, *, linear: Any, count: int, shapes: Any) -> tuple[Leaves, Leaves]:
    residuals, vs = list(primals[:count]), list(primals[count:])
    us, ws = tangents[: linear.num_record_leaves], tangents[count:]
    outputs = _bind_linear(linear, residuals, vs, shapes)
    perturbed = tuple(i for i, u in enumerate(us) if not _is_zero(u))
    output_tangents: list[Any] = [_zero_tangent(x) for x in outputs]
    if not all(map(_is_zero, ws)):
        output_tangents = _bind_linear(linear, residuals, list(map(ad.instantiate_zeros, ws)), shapes)
    if perturbed or any(not _is_zero(u) for u in tangents[linear.num_record_leaves : count]):
        # The results among the residuals are functions of the record: its tangents account for theirs.
        derivative_residuals = [*residuals[: linear.num_record_leaves], *vs]
        terms = _bind_linear(
            linear.derivative(perturbed),
            derivative_residuals,
            [linear.expand_tangent(i, us[i]) for i in perturbed],
            shapes,
        )
        output_tangents = _add_tangents(output_tangents, terms)
    return outputs, output_tangents


def _linear_transpose(cotangents: Any, *args: Any, linear: Any, count: int, shapes: Any) -> Leaves:
    nonzero_cotangents = [None if _is_zero(x) else x for x in cotangents]
    if all(x is None for x in nonzero_cotangents):
        return [None] * len(args)
    gradients = linear.transposed(list(args[:count]), nonzero_cotangents)
    is_linear = [ad.is_undefined_primal(x) for x in args[count:]]
    return [*[None] * count, *(x if needed else None for x, needed in zip(gradients, is_linear, strict=True))]


def _batch_results_and_tangents(args: Any, dims: Any, **params: Any) -> tuple[Leaves, list[int | None]]:
    count = params["count"]
    size, batch_first_args, mapped = _batch_first(args, dims, count)
    call = BatchedCall(params["call"], size, mapped[:count])
    axis = call.results_batch_axis
    shapes = params["shapes"] if axis is None else _batched_shapes(params["shapes"], size)
    tangent_shapes = _batched_shapes(params["tangent_shapes"], size)
    outputs = _RESULTS_AND_TANGENTS_P.bind(
        *batch_first_args, call=call, count=count, shapes=shapes, tangent_shapes=tangent_shapes
    )
    return outputs, [*[axis] * len(shapes), *[0] * len(tangent_shapes)]


def _batch_linear(args: Any, dims: Any, *, linear: Any, count: int, shapes: Any) -> tuple[Leaves, list[int]]:
    size, batch_first_args, mapped = _batch_first(args, dims, count)
    shapes, batched = _batched_shapes(shapes, size), BatchedMap(linear, size, mapped[:count])
    outputs = _LINEAR_MAP_P.bind(*batch_first_args, linear=batched, count=count, shapes=shapes)
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


def _partial_eval(trace: Any, *tracers: Any, **params: Any) -> Leaves:
    """Splits the primitive where the record is known and tangents are not, as when it is linearised."""
    call, count = params["call"], params["count"]
    xs, vs = tracers[:count], tracers[count:]
    if not all(x.is_known() for x in xs) or all(v.is_known() for v in vs):
        return trace.default_process_primitive(_RESULTS_AND_TANGENTS_P, tracers, params)
    values = [x.pval.get_known() for x in xs]
    results = call.forward(values)
    residuals = [*values, *jax.tree.leaves(results)]
    linear = {"linear": call.linear_map(results), "count": len(residuals), "shapes": params["tangent_shapes"]}
    tangents = trace.default_process_primitive(_LINEAR_MAP_P, [*residuals, *vs], linear)
    return [*jax.tree.leaves((results.output, results.residuals)), *tangents]


def _partial_eval_in_checkpoint(saveable: Any, unknown: Any, instantiated: Any, equation: Any) -> tuple[Any, ...]:
    """Splits the primitive in a function under `jax.checkpoint`, whose forward pass is run again for the gradients."""
    count, outputs = equation.params["count"], len(equation.outvars)
    missing = [x for x, done in zip(equation.invars, instantiated, strict=True) if type(x) is Var and not done]
    if any(unknown[:count]):
        return None, equation, [True] * outputs, [True] * outputs, missing
    results = len(equation.params["shapes"])
    known = equation
    if any(unknown):
        params = {**equation.params, "call": equation.params["call"].with_perturbed(()), "tangent_shapes": ()}
        known = equation.replace(invars=equation.invars[:count], outvars=equation.outvars[:results], params=params)
        tangents = [True] * (outputs - results)
    else:
        tangents = [False] * (outputs - results)
    return known, equation, [False] * results + tangents, [True] * outputs, missing


def _zero_tangent(x: jax.Array) -> Any:
    aval: Any = jax.typeof(x)
    return ad.Zero(aval.to_tangent_aval())


def _is_zero(x: Any) -> bool:
    return isinstance(x, ad.Zero)


for _primitive, _run, _abstract in (
    (_RESULTS_AND_TANGENTS_P, _run_results_and_tangents, _results_and_tangents_shapes),
    (_LINEAR_MAP_P, _run_linear, _linear_shapes),
):
    _primitive.def_impl(_run)
    _primitive.def_abstract_eval(_abstract)
    mlir.register_lowering(_primitive, mlir.lower_fun(_run, multiple_results=True))
ad.primitive_jvps[_RESULTS_AND_TANGENTS_P] = _results_and_tangents_jvp
ad.primitive_jvps[_LINEAR_MAP_P] = _linear_jvp
ad.primitive_transposes[_LINEAR_MAP_P] = _linear_transpose
batching.primitive_batchers[_RESULTS_AND_TANGENTS_P] = _batch_results_and_tangents
batching.primitive_batchers[_LINEAR_MAP_P] = _batch_linear
pe.custom_partial_eval_rules[_RESULTS_AND_TANGENTS_P] = _partial_eval
pe.partial_eval_jaxpr_custom_rules[_RESULTS_AND_TANGENTS_P] = _partial_eval_in_checkpoint
