"""Matrix products of a chunk, whose gradients are products of the same kind."""

import jax
import jax.numpy as jnp
from jax import lax

from ejkernel_pallas.tpu.mosaic.gradients import with_custom_gradient

Contract = tuple[int, int]
Pair = tuple[jax.Array, jax.Array]


def _dot_fwd(a: jax.Array, b: jax.Array, contract: Contract, exact: bool) -> tuple[jax.Array, Pair]:
    return dot(a, b, contract, exact), (a, b)


def _dot_bwd(contract: Contract, exact: bool, residuals: Pair, cotangent: jax.Array) -> Pair:
    a, b = residuals
    left, right = contract
    # a [m, k] has the gradient  cotangent [m, n] . b over n,  transposed if k is its first axis; and b correspondingly.
    a_gradient = dot(cotangent, b, (1, 1 - right), exact) if left else dot(b, cotangent, (1 - right, 1), exact)
    b_gradient = dot(cotangent, a, (0, 1 - left), exact) if right else dot(a, cotangent, (1 - left, 0), exact)
    return a_gradient.astype(a.dtype), b_gradient.astype(b.dtype)


@with_custom_gradient(_dot_fwd, _dot_bwd, static=(2, 3))
def dot(a: jax.Array, b: jax.Array, contract: Contract, exact: bool) -> jax.Array:
    """Returns the product of two matrices over one axis of each, in float32.

    Args:
        a: [.., ..]
        b: [.., ..]
        contract: The contracted axis of each.
        exact: Whether operands keep float32's precision, in six passes of the matrix unit; else they are rounded to
            bfloat16 and take one.
    """
    a, b = (x.astype(jnp.float32 if exact else jnp.bfloat16) for x in (a, b))
    precision = lax.Precision.HIGHEST if exact else None
    dims = (((contract[0],), (contract[1],)), ((), ()))
    return lax.dot_general(a, b, dims, precision=precision, preferred_element_type=jnp.float32)


def indices(size: int) -> tuple[jax.Array, jax.Array]:
    """Returns row and column indices of a square matrix, int32."""
    row, column = (lax.broadcasted_iota(jnp.int32, (size, size), axis) for axis in (0, 1))
    return row, column
