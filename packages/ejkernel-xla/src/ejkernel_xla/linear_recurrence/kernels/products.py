"""Products and their gradients in the forms that XLA's CPU backend runs fast.

A sum over an axis of the product of two arrays is many times slower there than the same sum as a matrix product, so all
of them are written as matrix products. Slow among these are the ones that contract the first axis of the left matrix,
and JAX's default gradients of a matrix product are of that kind.
"""

import functools
from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax import lax

from ejkernel.types.forward_mode import reverse_rule

ArrayPair = tuple[jax.Array, jax.Array]


def with_gradients(static_argument_index: int) -> Callable[[Callable[..., jax.Array]], jax.custom_vjp[jax.Array]]:
    """Returns `jax.custom_vjp` of a function whose argument at that index is not an array."""
    rule = functools.partial(cast(Any, jax.custom_vjp), nondiff_argnums=(static_argument_index,))
    return lambda function: reverse_rule(rule(function))


def exact_einsum(subscripts: str, *arrays: jax.Array) -> jax.Array:
    """Computes `einsum` with all digits, for sums so small that lower precision would save no time."""
    return jnp.einsum(subscripts, *arrays, precision=lax.Precision.HIGHEST)


def dot_products(left: jax.Array, right: jax.Array) -> jax.Array:
    """Returns products of the vectors along the last axis: [..., d] and [..., d] to [...]."""
    return exact_einsum("...d,...d->...", left, right)


@with_gradients(2)
def multiply(left: jax.Array, right: jax.Array, precision: Any) -> jax.Array:
    """Returns [..., n, d] and [..., d, m] to [..., n, m]; all leading sizes are the same."""
    return jnp.matmul(left, right, precision=precision)


@with_gradients(2)
def multiply_rows(left: jax.Array, right: jax.Array, precision: Any) -> jax.Array:
    """Returns products of the rows of two matrices: [..., n, d] and [..., m, d] to [..., n, m]."""
    return jnp.matmul(left, _transpose(right), precision=precision)


@with_gradients(2)
def multiply_columns(left: jax.Array, right: jax.Array, precision: Any) -> jax.Array:
    """Returns products of the columns of two matrices: [..., d, n] and [..., d, m] to [..., n, m]."""
    return jnp.matmul(_transpose(left), right, precision=precision)


def _transpose(x: jax.Array) -> jax.Array:
    return jnp.swapaxes(x, -1, -2)


def _save_operands(call: Any) -> Any:
    return lambda left, right, precision: (call(left, right, precision), (left, right))


def _multiply_gradients(precision: Any, saved: ArrayPair, cotangent: jax.Array) -> ArrayPair:
    left, right = saved
    return multiply_rows(cotangent, right, precision), multiply_columns(left, cotangent, precision)


def _rows_gradients(precision: Any, saved: ArrayPair, cotangent: jax.Array) -> ArrayPair:
    left, right = saved
    return multiply(cotangent, right, precision), multiply_columns(cotangent, left, precision)


def _columns_gradients(precision: Any, saved: ArrayPair, cotangent: jax.Array) -> ArrayPair:
    left, right = saved
    return multiply_rows(right, cotangent, precision), multiply(left, cotangent, precision)


multiply.defvjp(_save_operands(multiply), _multiply_gradients)
multiply_rows.defvjp(_save_operands(multiply_rows), _rows_gradients)
multiply_columns.defvjp(_save_operands(multiply_columns), _columns_gradients)


def multiply_shared_columns(left: jax.Array, right: jax.Array, precision: Any) -> jax.Array:
    """Returns `multiply_columns` of [m, a, b] and [n, a, d]: [n, b, d]. n / m neighbours share their left matrix."""
    return split_side_by_side_matrices(
        multiply_columns(left, side_by_side(right, left.shape[0]), precision), right.shape[0]
    )


def side_by_side(x: jax.Array, count: int) -> jax.Array:
    """Returns matrices [n, a, d] as [count, a, n / count * d]."""
    if x.shape[0] == count:
        return x
    return jnp.swapaxes(x.reshape(count, -1, *x.shape[1:]), 1, 2).reshape(count, x.shape[1], -1)


def split_side_by_side_matrices(x: jax.Array, count: int) -> jax.Array:
    """Undoes `side_by_side`: [m, a, count / m * d] as [count, a, d]."""
    if x.shape[0] == count:
        return x
    parts = x.reshape(*x.shape[:2], count // x.shape[0], -1)
    return jnp.swapaxes(parts, 1, 2).reshape(count, x.shape[1], -1)


@with_gradients(1)
def row_products_of_matrix(x: jax.Array, precision: Any) -> jax.Array:
    """Returns products of the rows of a matrix: [..., n, d] to [..., n, n]."""
    return multiply_rows(x, x, precision)


def _row_products_gradient(precision: Any, x: jax.Array, cotangent: jax.Array) -> tuple[jax.Array]:
    return (multiply(cotangent + _transpose(cotangent), x, precision),)


row_products_of_matrix.defvjp(lambda x, precision: (row_products_of_matrix(x, precision), x), _row_products_gradient)


@reverse_rule
@jax.custom_vjp
def scale_vectors(x: jax.Array, weights: jax.Array) -> jax.Array:
    """Returns [..., d] times weights [...]."""
    return x * weights[..., None]


def _scale_vectors_gradients(saved: ArrayPair, cotangent: jax.Array) -> ArrayPair:
    x, weights = saved
    return cotangent * weights[..., None], dot_products(cotangent, x)


scale_vectors.defvjp(lambda x, weights: (scale_vectors(x, weights), (x, weights)), _scale_vectors_gradients)


@reverse_rule
@jax.custom_vjp
def weigh_products(products: jax.Array, weights: jax.Array) -> jax.Array:
    """Returns products [m, C, C] times weights [n, C, C], where n / m neighbours share products: [n, C, C]."""
    return _repeat(products, weights.shape[0]) * weights


def _weigh_products_gradients(saved: ArrayPair, cotangent: jax.Array) -> ArrayPair:
    products, weights = saved
    weight_gradients = cotangent * _repeat(products, cotangent.shape[0])
    if products.shape == weights.shape:
        return cotangent * weights, weight_gradients
    shared = (x.reshape(products.shape[0], -1, *x.shape[1:]) for x in (cotangent, weights))
    return exact_einsum("mnij,mnij->mij", *shared), weight_gradients


weigh_products.defvjp(
    lambda products, weights: (weigh_products(products, weights), (products, weights)), _weigh_products_gradients
)


@reverse_rule
@jax.custom_vjp
def decay_rows(state: jax.Array, weights: jax.Array) -> jax.Array:
    """Returns states [n, K, V] times the weights of their rows [n, K], or of the whole [n, 1]."""
    return state * weights[..., :, None]


def _decay_rows_gradients(saved: ArrayPair, cotangent: jax.Array) -> ArrayPair:
    state, weights = saved
    one = weights.shape[-1] == 1
    weight_gradients = (
        exact_einsum("nkv,nkv->n", cotangent, state)[..., None] if one else dot_products(cotangent, state)
    )
    return cotangent * weights[..., :, None], weight_gradients


decay_rows.defvjp(lambda state, weights: (decay_rows(state, weights), (state, weights)), _decay_rows_gradients)


@reverse_rule
@jax.custom_vjp
def decay_columns(state: jax.Array, weights: jax.Array) -> jax.Array:
    """Returns states [n, K, V] times the weights of their columns [n, V]."""
    return state * weights[..., None, :]


def _decay_columns_gradients(saved: ArrayPair, cotangent: jax.Array) -> ArrayPair:
    state, weights = saved
    return cotangent * weights[..., None, :], exact_einsum("nkv,nkv->nv", cotangent, state)


decay_columns.defvjp(lambda state, weights: (decay_columns(state, weights), (state, weights)), _decay_columns_gradients)


def repeat_along_first_axis(x: jax.Array, count: int) -> jax.Array:
    """Returns [m, ...] as [count, ...]: each of the m is repeated `count / m` times."""
    return x if x.shape[0] == count else _repeat_with_gradient(x, count)


def _repeat(x: jax.Array, count: int) -> jax.Array:
    return x if x.shape[0] == count else jnp.repeat(x, count // x.shape[0], axis=0)


_repeat_with_gradient = with_gradients(1)(_repeat)


def _expand_gradient(count: int, saved: tuple[int], cotangent: jax.Array) -> tuple[jax.Array]:
    # Halved by additions of slices, which vectorise along the last axis, as long as the count is even.
    shared = cotangent.reshape(-1, saved[0], *cotangent.shape[1:])
    while shared.shape[1] % 2 == 0:
        half = shared.shape[1] // 2
        shared = shared[:, :half] + shared[:, half:]
    return (shared.sum(axis=1),)


_repeat_with_gradient.defvjp(lambda x, count: (_repeat(x, count), (count // x.shape[0],)), _expand_gradient)
