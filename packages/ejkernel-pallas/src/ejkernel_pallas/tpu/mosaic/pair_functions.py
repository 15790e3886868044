"""`score_mod` and `mask_mod` of a chunk: the part of a function that `split_functions` leaves to the kernels.

Every operation is on scalars in the caller's function, and on vectors of all pairs of the chunk here. A difference of
the query's and the key's index that the function converts to float32 is computed in float32: one operation per pair
instead of two or three, with the same result, as float32 has all integers of that size.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

from ejkernel.types.pair_functions import literal_value
from ejkernel_pallas.tpu.mosaic.split_functions import UNCHANGED

MAX_EXACT_INDEX = 2**24
"""The largest index up to which float32 has all integers, and so all differences of indices."""

Distances = Callable[[int], jax.Array]
"""Returns, in float32 for all pairs of a chunk, key index minus query index for 1, and the opposite for -1."""


def evaluate_pairs(
    program: ClosedJaxpr, inputs: Sequence[jax.Array], shape: tuple[int, int], distances: Distances | None = None
) -> jax.Array:
    """Returns the result of a program of scalars for all pairs of a chunk.

    An operation takes the shape of its operands: one of keys alone is computed once per key. Masks have the shape of
    the chunk, since Mosaic does not broadcast them.

    Args:
        program: The program.
        inputs: Its inputs, each of the chunk's shape or with an axis of size 1.
        shape: The shape of the chunk.
        distances: Differences of the last two inputs; None to convert integers.
    """
    known = {} if distances is None else _float_distances(program.jaxpr, distances)
    (result,) = _evaluate(program, [*program.consts, *inputs], shape, known)
    return jnp.broadcast_to(result, shape)


def _float_distances(jaxpr: Jaxpr, distances: Distances) -> dict[Any, jax.Array]:
    """Returns the values of those variables that are a difference of indices in float32, or its absolute value."""
    query, key = jaxpr.invars[-2:]
    sources = {eqn.outvars[0]: eqn for eqn in jaxpr.eqns}
    known: dict[Any, jax.Array] = {}
    for eqn in jaxpr.eqns:
        output: Any = eqn.outvars[0]
        if eqn.primitive.name != "convert_element_type" or output.aval.dtype != jnp.float32:
            continue
        source = _source(sources, eqn)
        is_absolute = source is not None and source.primitive.name == "abs"
        source = _source(sources, source) if is_absolute else source
        if source is not None and source.primitive.name == "sub" and source.invars in ([key, query], [query, key]):
            x = distances(1 if source.invars[0] is key else -1)
            known[eqn.outvars[0]] = jnp.abs(x) if is_absolute else x
    return known


def _source(sources: dict[Any, Any], eqn: Any) -> Any:
    """Returns the operation whose result is an operation's first operand; None if that is an input or a number."""
    (operand, *_) = eqn.invars
    return None if isinstance(operand, Literal) else sources.get(operand)


def _evaluate(
    program: ClosedJaxpr, values: Sequence[Any], shape: tuple[int, int], computed: dict[Any, jax.Array] | None = None
) -> list[Any]:
    """Returns the results of a program, some of whose variables may have been computed already."""
    jaxpr = program.jaxpr
    known = dict(zip((*jaxpr.constvars, *jaxpr.invars), values, strict=True)) | (computed or {})

    def read(x: Any) -> Any:
        return literal_value(x) if isinstance(x, Literal) else known[x]

    for eqn in jaxpr.eqns:
        if eqn.outvars[0] in known:
            continue
        operands = list(map(read, eqn.invars))
        inner = eqn.params.get("jaxpr") or eqn.params.get("call_jaxpr")
        if inner is not None:
            results = _evaluate(inner, [*inner.consts, *operands], shape)
        elif eqn.primitive.name in UNCHANGED:
            results = operands
        else:
            results = [_bind(eqn, _with_one_shape(operands, eqn, shape))]
        known.update(zip(eqn.outvars, results, strict=True))
    return list(map(read, jaxpr.outvars))


def _bind(eqn: Any, operands: Sequence[jax.Array]) -> jax.Array:
    if eqn.primitive.name == "add_any":  # a sum of gradients
        return operands[0] + operands[1]
    return eqn.primitive.bind(*operands, **eqn.params)


def _with_one_shape(operands: Sequence[Any], eqn: Any, shape: tuple[int, int]) -> list[jax.Array]:
    """Returns the operands of an operation, broadcast to each other; scalars become vectors."""
    has_masks = any(x.aval.dtype == jnp.bool_ for x in (*eqn.invars, *eqn.outvars))
    shapes = [x.shape for x in operands if jnp.ndim(x) == 2]
    target = shape if has_masks or not shapes else jnp.broadcast_shapes(*shapes)
    dtypes = [x.aval.dtype for x in eqn.invars]
    return [jnp.broadcast_to(jnp.asarray(x, dtype), target) for x, dtype in zip(operands, dtypes, strict=True)]
