"""Matrix products of a chunk, whose gradients are products of the same kind."""

import jax
import jax.numpy as jnp
from jax import lax

from ejkernel_pallas.tpu.mosaic.gradients import with_custom_gradient

ContractedAxes = tuple[int, int]
OperandPair = tuple[jax.Array, jax.Array]


def _dot_fwd(
    a: jax.Array, b: jax.Array, contracted_axes: ContractedAxes, keeps_float32: bool
) -> tuple[jax.Array, OperandPair]:
    return dot(a, b, contracted_axes, keeps_float32), (a, b)


def _dot_bwd(
    contracted_axes: ContractedAxes, keeps_float32: bool, residuals: OperandPair, cotangent: jax.Array
) -> OperandPair:
    a, b = residuals
    left, right = contracted_axes
    # a [m, k] has the gradient  cotangent [m, n] . b over n,  transposed if k is its first axis; and b correspondingly.
    a_gradient = (
        dot(cotangent, b, (1, 1 - right), keeps_float32) if left else dot(b, cotangent, (1 - right, 1), keeps_float32)
    )
    b_gradient = (
        dot(cotangent, a, (0, 1 - left), keeps_float32) if right else dot(a, cotangent, (1 - left, 0), keeps_float32)
    )
    return a_gradient.astype(a.dtype), b_gradient.astype(b.dtype)


@with_custom_gradient(_dot_fwd, _dot_bwd, static_argnums=(2, 3))
def dot(a: jax.Array, b: jax.Array, contracted_axes: ContractedAxes, keeps_float32: bool) -> jax.Array:
    """Returns the product of two matrices over one axis of each, in float32.

    Args:
        a: [.., ..]
        b: [.., ..]
        contracted_axes: The contracted axis of each.
        keeps_float32: Whether operands keep float32's precision, in six passes of the matrix unit; else they are
            rounded to bfloat16 and take one.
    """
    a, b = (x.astype(jnp.float32 if keeps_float32 else jnp.bfloat16) for x in (a, b))
    precision = lax.Precision.HIGHEST if keeps_float32 else None
    dims = (((contracted_axes[0],), (contracted_axes[1],)), ((), ()))
    return lax.dot_general(a, b, dims, precision=precision, preferred_element_type=jnp.float32)


def _dot_split_fwd(a: jax.Array, b: jax.Array, contracted_axes: ContractedAxes) -> tuple[jax.Array, OperandPair]:
    return dot_split(a, b, contracted_axes), (a, b)


def _dot_split_bwd(contracted_axes: ContractedAxes, residuals: OperandPair, cotangent: jax.Array) -> OperandPair:
    return _dot_bwd(contracted_axes, False, residuals, cotangent)


@with_custom_gradient(_dot_split_fwd, _dot_split_bwd, static_argnums=(2,))
def dot_split(a: jax.Array, b: jax.Array, contracted_axes: ContractedAxes) -> jax.Array:
    """Returns the product of two float32 matrices in three passes, which keep 16 bits of each; gradients take one."""
    high_a, low_a = _split_bfloat16(a)
    high_b, low_b = _split_bfloat16(b)
    total = dot(high_a, high_b, contracted_axes, False)
    return total + dot(low_a, high_b, contracted_axes, False) + dot(high_a, low_b, contracted_axes, False)


def _split_bfloat16(x: jax.Array) -> OperandPair:
    """Returns two bfloat16 matrices whose sum has the first 16 bits of a float32 matrix."""
    high = x.astype(jnp.bfloat16)
    return high, (x - high.astype(jnp.float32)).astype(jnp.bfloat16)


def row_and_column_indices(size: int) -> tuple[jax.Array, jax.Array]:
    """Returns row and column indices of a square matrix, int32."""
    row, column = (lax.broadcasted_iota(jnp.int32, (size, size), axis) for axis in (0, 1))
    return row, column
