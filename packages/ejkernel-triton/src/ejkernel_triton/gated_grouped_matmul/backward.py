"""The gradients of the gated grouped matmul in Triton: the products again, and the gradients of the plain product."""

import jax

from ejkernel.families.gated_grouped_matmul.gradients import recompute_products_and_gradients
from ejkernel.families.grouped_matmul import GroupedMatmul
from ejkernel.ops.device import current_device
from ejkernel.types.pullback import Pullback
from ejkernel_triton.grouped_matmul.backward import backward as grouped_backward
from ejkernel_triton.grouped_matmul.config import GroupedBackward, heuristic
from ejkernel_triton.grouped_matmul.forward import forward as grouped


def backward(pullback: Pullback, config: GroupedBackward) -> dict[str, jax.Array]:
    """Returns gradients of lhs, of the matrices and of their biases; the products are computed again.

    Args:
        pullback: Record, cotangent [M, F], and the requested names.
        config: Tile sizes, programs, warps and stages of the kernels of the product's gradients.

    Returns:
        Each requested gradient, in its field's shape and dtype.
    """

    def multiply_rows(as_grouped_matmul: GroupedMatmul) -> jax.Array:
        return grouped(as_grouped_matmul, heuristic(as_grouped_matmul, current_device(), "forward"))[0]

    return recompute_products_and_gradients(
        pullback, multiply_rows, lambda product_pullback: grouped_backward(product_pullback, config)
    )
