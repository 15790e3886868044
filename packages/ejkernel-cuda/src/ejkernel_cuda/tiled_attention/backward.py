"""The gradients of tiled attention by cuDNN."""

from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.families.tiled_attention import TiledAttention
from ejkernel.types.pullback import Pullback
from ejkernel_cuda.tiled_attention.kernels.cudnn import (
    drop_none,
    emit_custom_call,
    query_key_value,
    replace_infinite_bias,
)

# The matrix products of attention by name: contracted and batch axes of both operands, for arrays in their memory
# layout.
BACKWARD_PRODUCT_DIMENSIONS = {
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
        record, lse = replace_infinite_bias(record), jnp.where(lse == -jnp.inf, 0, lse)
    lse_and_cotangent = (lse, pullback.cotangent)
    # The order of operands of XLA's custom call: the output comes after the bias.
    operands = drop_none(*query_key_value(record), *lse_and_cotangent, record.bias, pullback.output)
    gradients = emit_custom_call(
        record, "Backward", BACKWARD_PRODUCT_DIMENSIONS, operands, query_key_value(record), drop_none(record.bias)
    )
    # Not strict, since without a bias its gradient is missing.
    return dict(zip(("query", "key", "value", "bias"), gradients, strict=False))
