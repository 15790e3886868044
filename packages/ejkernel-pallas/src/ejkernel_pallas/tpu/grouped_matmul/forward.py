"""Forward pass of a grouped matmul on TPUs."""

import jax
import jax.numpy as jnp

from ejkernel.families.gated_grouped_matmul import (
    GatedGroupedMatmul,
    as_grouped_matmul,
    gathered_tokens,
    rows_with_a_token,
)
from ejkernel.families.grouped_matmul import GroupedMatmul
from ejkernel_pallas.tpu.grouped_matmul.config import TpuMatmul
from ejkernel_pallas.tpu.grouped_matmul.kernels.grouped_matmul import multiply
from ejkernel_pallas.tpu.grouped_matmul.spec import forward_spec, gated_spec, tile_sizes_of


def forward(record: GroupedMatmul, config: TpuMatmul) -> tuple[jax.Array, tuple[()]]:
    """Returns the output of a record.

    Args:
        record: The canonical arguments.
        config: Tile sizes `block_m`, `block_k` and `block_n`.

    Raises:
        ValueError: A tile size is not valid for the kernel.

    Returns:
        [M, N] in the record's `out_dtype`. There are no residuals.
    """
    epilogue_arrays = {} if record.existing_out is None else {"existing_output": record.existing_out}
    if record.rhs_bias is not None:
        epilogue_arrays["bias"] = record.rhs_bias.astype(jnp.float32)
    spec = forward_spec(record, tile_sizes_of(config))
    return multiply(record, record.lhs, spec, epilogue_arrays, record.out_dtype), ()


def gated_forward(record: GatedGroupedMatmul, config: TpuMatmul) -> tuple[jax.Array, tuple[()]]:
    """Returns the output of a gated product: XLA gathers the rows, and the kernel gates the sums before it writes them.

    Args:
        record: The canonical arguments.
        config: Tile sizes `block_m`, `block_k` and `block_n`; `block_n` are columns of the output.

    Raises:
        ValueError: A tile size is none that a kernel can have.

    Returns:
        [M, F] in lhs's dtype. There are no residuals.
    """
    product = as_grouped_matmul(record, gathered_tokens(record), record.lhs.dtype)
    spec, epilogue_arrays = gated_spec(record, product, tile_sizes_of(config)), dict[str, jax.Array]()
    if record.rhs_bias is not None:
        epilogue_arrays["bias"] = record.rhs_bias.astype(jnp.float32)
        if record.indices is not None:  # the product of a row without a token is the bias
            epilogue_arrays["row_has_token"] = rows_with_a_token(record).astype(jnp.float32)
    return multiply(product, product.lhs, spec, epilogue_arrays, record.lhs.dtype), ()
