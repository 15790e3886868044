"""The gated grouped matmul in XLA."""

import dataclasses

import jax

from ejkernel.families.gated_grouped_matmul import GatedGroupedMatmul, apply_gate, as_grouped_matmul, gathered_tokens
from ejkernel.families.grouped_matmul import product_sum_dtype
from ejkernel.planning.fixed_tiles import map_tiles
from ejkernel_xla.fixed_tiles import RowOrder
from ejkernel_xla.grouped_matmul.config import batch_invariant, heuristic
from ejkernel_xla.grouped_matmul.forward import forward as grouped


def forward(record: GatedGroupedMatmul, config: RowOrder) -> tuple[jax.Array, tuple[()]]:
    """Returns the output of a record.

    Args:
        record: The canonical arguments.
        config: Whether rows are computed in tiles of fixed sizes.

    Returns:
        [M, F] in lhs's dtype. There are no residuals.
    """
    product = as_grouped_matmul(record, gathered_tokens(record), product_sum_dtype(record.lhs.dtype))
    rule = batch_invariant if config.batch_invariant else heuristic
    products, _ = grouped(product, rule(product, None, "forward"))
    if not config.batch_invariant:
        return apply_gate(record, products), ()
    arrays = {"products": products} if record.indices is None else {"products": products, "indices": record.indices}

    def tile(arrays: dict[str, jax.Array]) -> jax.Array:
        return apply_gate(dataclasses.replace(record, indices=arrays.get("indices")), arrays["products"])

    return map_tiles(tile, arrays), ()
