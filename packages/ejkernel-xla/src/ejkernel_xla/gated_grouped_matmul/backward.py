"""The gradients of the gated grouped matmul in XLA."""

from typing import Any

import jax

from ejkernel.families.gated_grouped_matmul.gradients import recompute_products_and_gradients
from ejkernel.families.grouped_matmul import GroupedMatmul
from ejkernel.types.pullback import Pullback
from ejkernel_xla.grouped_matmul.backward import backward as grouped_backward
from ejkernel_xla.grouped_matmul.config import heuristic
from ejkernel_xla.grouped_matmul.forward import forward as grouped


def backward(pullback: Pullback, config: Any) -> dict[str, jax.Array]:
    """Returns gradients of lhs, of the matrices and of their biases; the products are computed again.

    Args:
        pullback: Record, cotangent [M, F], and the requested names.
        config: Not read.

    Returns:
        Each requested gradient, in its field's shape and dtype.
    """

    def multiply(product: GroupedMatmul) -> jax.Array:
        return grouped(product, heuristic(product, None, "forward"))[0]

    def gradients(inner: Pullback) -> dict[str, jax.Array]:
        return grouped_backward(inner, heuristic(inner.record, None, "forward"))

    return recompute_products_and_gradients(pullback, multiply, gradients)
