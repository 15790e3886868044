"""Forward pass of a grouped matmul on TPUs."""

import jax
import jax.numpy as jnp

from ejkernel.families.grouped_matmul import GroupedMatmul
from ejkernel_pallas.tpu.grouped_matmul.config import TpuMatmul
from ejkernel_pallas.tpu.grouped_matmul.kernels.grouped_matmul import multiply
from ejkernel_pallas.tpu.grouped_matmul.spec import blocks_of, forward_spec


def forward(record: GroupedMatmul, config: TpuMatmul) -> tuple[jax.Array, tuple[()]]:
    """Returns the output of a record.

    Args:
        record: The canonical arguments.
        config: Tile sizes `block_m`, `block_k` and `block_n`.

    Raises:
        ValueError: A tile size is none that a kernel can have.

    Returns:
        [M, N] in the record's `out_dtype`. There are no residuals.
    """
    extra = {} if record.existing_out is None else {"existing": record.existing_out}
    if record.rhs_bias is not None:
        extra["bias"] = record.rhs_bias.astype(jnp.float32)
    spec = forward_spec(record, blocks_of(config))
    return multiply(record, record.lhs, spec, extra, record.out_dtype), ()
