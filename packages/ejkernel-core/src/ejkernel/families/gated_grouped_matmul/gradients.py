"""The gradients of the gated grouped matmul, by any kernels of the plain one."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from ejkernel.families.gated_grouped_matmul.record import (
    GatedGroupedMatmul,
    apply_gate,
    as_grouped_matmul,
    gathered_tokens,
    rows_with_a_token,
)
from ejkernel.families.grouped_matmul import GroupedMatmul, product_sum_dtype
from ejkernel.types.pullback import Pullback


def recompute_products_and_gradients(
    pullback: Pullback,
    multiply: Callable[[GroupedMatmul], jax.Array],
    gradients: Callable[[Pullback], dict[str, jax.Array]],
) -> dict[str, jax.Array]:
    """Returns gradients of lhs, of the matrices and of their biases; the products are computed again.

    Args:
        pullback: Record, cotangent [M, F], and the requested names.
        multiply: The product of a record of the grouped matmul.
        gradients: The gradients of that product.

    Returns:
        Each requested gradient, in its field's shape and dtype.
    """
    record: GatedGroupedMatmul = pullback.record
    product = as_grouped_matmul(record, gathered_tokens(record), product_sum_dtype(record.lhs.dtype))
    products = multiply(product)
    _, gate_pullback = jax.vjp(lambda products: apply_gate(record, products), products)
    (cotangent,) = gate_pullback(pullback.cotangent)
    inner = Pullback(
        record=product, residuals=(), output=products, cotangent=cotangent, grad_fields=frozenset(pullback.grad_fields)
    )
    found = gradients(inner)
    if "lhs" in pullback.grad_fields and record.indices is not None:
        found["lhs"] = _sum_rows_by_token(record, record.indices, found["lhs"])
    return found


def _sum_rows_by_token(record: GatedGroupedMatmul, indices: jax.Array, rows: jax.Array) -> jax.Array:
    """Returns the sums [T, K] of the rows [M, K] of each token, in the order of rows, so that two runs give the same
    bits.

    Rows are sorted by token; round r adds the r-th row of every token. There are as many rounds as a token has rows.
    """
    tokens, count = record.lhs.shape[0], rows.shape[0]
    if not tokens or not count:
        return jnp.zeros_like(record.lhs)
    token = jnp.where(rows_with_a_token(record), indices, tokens)
    order = jnp.argsort(token, stable=True)
    bounds = jnp.searchsorted(token[order], jnp.arange(tokens + 1)).astype(jnp.int32)
    first, end = bounds[:-1], bounds[1:]

    def add_next_row_of_each_token(carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        index, sums = carry
        at = first + index
        row = rows[order[jnp.minimum(at, count - 1)]]
        return index + 1, sums + jnp.where((at < end)[:, None], row, 0).astype(sums.dtype)

    start = jnp.int32(0), jnp.zeros(record.lhs.shape, product_sum_dtype(record.lhs.dtype))
    _, sums = lax.while_loop(lambda carry: carry[0] < jnp.max(end - first), add_next_row_of_each_token, start)
    return sums.astype(record.lhs.dtype)
