"""`score_mod` and `mask_mod` of a chunk: the part of a function that `split_functions` leaves to the kernels.

Every operation is on scalars in the caller's function, and on vectors of all pairs of the chunk here.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Literal

from ejkernel.types.pair_functions import literal_value
from ejkernel_pallas.tpu.mosaic.split_functions import UNCHANGED


def evaluate_pairs(program: ClosedJaxpr, inputs: Sequence[jax.Array], shape: tuple[int, int]) -> jax.Array:
    """Returns the result of a program of scalars for all pairs of a chunk.

    An operation takes the shape of its operands: one of keys alone is computed once per key. Masks have the shape of
    the chunk, since Mosaic does not broadcast them.

    Args:
        program: The program.
        inputs: Its inputs, each of the chunk's shape or with an axis of size 1.
        shape: The shape of the chunk.
    """
    (result,) = _evaluate(program, [*program.consts, *inputs], shape)
    return jnp.broadcast_to(result, shape)


def _evaluate(program: ClosedJaxpr, values: Sequence[Any], shape: tuple[int, int]) -> list[Any]:
    jaxpr = program.jaxpr
    known = dict(zip((*jaxpr.constvars, *jaxpr.invars), values, strict=True))

    def read(x: Any) -> Any:
        return literal_value(x) if isinstance(x, Literal) else known[x]

    for eqn in jaxpr.eqns:
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
