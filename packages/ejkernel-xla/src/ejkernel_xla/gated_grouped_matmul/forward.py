"""The gated grouped matmul in XLA."""

from typing import Any

import jax

from ejkernel.families.gated_grouped_matmul import GatedGroupedMatmul, apply_gate, as_grouped_matmul, gathered_tokens
from ejkernel.families.grouped_matmul import product_sum_dtype
from ejkernel_xla.grouped_matmul.config import heuristic
from ejkernel_xla.grouped_matmul.forward import forward as grouped


def forward(record: GatedGroupedMatmul, config: Any) -> tuple[jax.Array, tuple[()]]:
    """Returns the output of a record.

    Args:
        record: The canonical arguments.
        config: Not read.

    Returns:
        [M, F] in lhs's dtype. There are no residuals.
    """
    product = as_grouped_matmul(record, gathered_tokens(record), product_sum_dtype(record.lhs.dtype))
    products, _ = grouped(product, heuristic(product, None, "forward"))
    return apply_gate(record, products), ()
