"""Defines what gated grouped matmul computes, in plain jnp.

Every row names a token and is multiplied with the matrix of its group; the first half of the columns gates the second:

    y = x_t W_e + b_e    t = i_m, e the group of row m          o_m = act(y[:F]) y[F:]

With a limit L, alpha and beta, as GPT-OSS has them, u = min(y[:F], L) and v = clip(y[F:], -L, L):

    o_m = u sigmoid(alpha u) (v + beta)

Interleaved, u and v are the even and the odd columns of y. Without a gate, o_m = act(y).

The product is taken as `grouped_matmul` takes it, and gated before it is rounded. A row that names no token, and one of
no group, is 0; with `left_over="undefined"`, unassigned rows are any numbers.

Source: the gated linear units of Shazeer 2020, arXiv:2002.05202, in the experts of Gale et al. 2022, arXiv:2211.15841.
"""

import jax

from ejkernel.families import grouped_matmul
from ejkernel.families.gated_grouped_matmul.record import (
    GatedGroupedMatmul,
    apply_gate,
    as_grouped_matmul,
    gathered_tokens,
)


def reference(record: GatedGroupedMatmul) -> tuple[jax.Array, tuple[()]]:
    """Computes the result of the family in plain jnp; in float64 if `lhs` is float64, else in float32.

    Returns:
        [M, F] in lhs's dtype. There are no residuals.
    """
    wide = grouped_matmul.product_sum_dtype(record.lhs.dtype)
    products, _ = grouped_matmul.reference(as_grouped_matmul(record, gathered_tokens(record), wide))
    return apply_gate(record, products), ()
