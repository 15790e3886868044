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

    Args:
        program: The program.
        inputs: Its inputs, each of the chunk's shape or broadcast to it.
        shape: The shape of the chunk.
    """
    consts = [jnp.full(shape, x) for x in program.consts]
    return _evaluate(program, [*consts, *(jnp.broadcast_to(x, shape) for x in inputs)], shape)[0]


def _evaluate(program: ClosedJaxpr, values: Sequence[jax.Array], shape: tuple[int, int]) -> list[jax.Array]:
    jaxpr = program.jaxpr
    known = dict(zip((*jaxpr.constvars, *jaxpr.invars), values, strict=True))

    def read(x: Any) -> jax.Array:
        if not isinstance(x, Literal):
            return known[x]
        return jnp.full(shape, literal_value(x))

    for eqn in jaxpr.eqns:
        operands = list(map(read, eqn.invars))
        inner = eqn.params.get("jaxpr") or eqn.params.get("call_jaxpr")
        if inner is not None:
            results = _evaluate(inner, [*(jnp.full(shape, x) for x in inner.consts), *operands], shape)
        elif eqn.primitive.name in UNCHANGED:
            results = operands
        elif eqn.primitive.name == "add_any":  # a sum of gradients
            results = [operands[0] + operands[1]]
        else:
            results = [eqn.primitive.bind(*operands, **eqn.params)]
        known.update(zip(eqn.outvars, results, strict=True))
    return list(map(read, jaxpr.outvars))
