"""The gradients of tiled attention by cuDNN."""

from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.families.tiled_attention import TiledAttention
from ejkernel.types.pullback import Pullback
from ejkernel_cuda.tiled_attention.kernels.cudnn import call, finite, inputs_of, present

# The matrix products of attention by name: contracted and batch axes of both operands, for arrays in their memory
# layout.
BACKWARD_PRODUCTS = {
    "bmm1_grad_gemm1": ((2, 1), ((0, 1), (0, 2))),
    "bmm1_grad_gemm2": ((3, 1), ((0, 1), (0, 2))),
    "bmm2_grad_gemm1": ((2, 1), ((0, 1), (0, 2))),
    "bmm2_grad_gemm2": ((3, 3), ((0, 2), (0, 2))),
}


def backward(pullback: Pullback, config: Any) -> dict[str, jax.Array]:
    """Returns the gradients of query, key, value and bias."""
    record: TiledAttention = pullback.record
    lse = pullback.residuals.lse
    if record.bias is not None:
        # Rows that attend to nothing have lse -inf. With 0 instead, their weights exp(s - lse) are 0, and so are all
        # gradients.
        record, lse = finite(record), jnp.where(lse == -jnp.inf, 0, lse)
    saved = (lse, pullback.cotangent)
    # The order of operands of XLA's custom call: the output comes after the bias.
    operands = present(*inputs_of(record), *saved, record.bias, pullback.output)
    made = call(record, "Backward", BACKWARD_PRODUCTS, operands, inputs_of(record), present(record.bias))
    # Not strict, since without a bias its gradient is missing.
    return dict(zip(("query", "key", "value", "bias"), made, strict=False))
