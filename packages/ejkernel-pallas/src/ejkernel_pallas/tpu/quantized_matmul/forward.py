"""Forward pass of the quantized matmul on TPUs."""

from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.families.quantized_matmul import QuantizedMatmul, apply_tensor_scale
from ejkernel_pallas.tpu.quantized_matmul.config import TpuQuantized
from ejkernel_pallas.tpu.quantized_matmul.kernels.matmul import multiply_packed
from ejkernel_pallas.tpu.quantized_matmul.kernels.transposed_matmul import multiply_transposed_packed
from ejkernel_pallas.tpu.quantized_matmul.spec import make_spec


def forward(record: QuantizedMatmul, config: TpuQuantized) -> tuple[jax.Array, tuple[()]]:
    """Returns the output of a record.

    Args:
        record: The canonical arguments.
        config: Tiles.

    Returns:
        [M, N] in x's dtype. There are no residuals.
    """
    kernel = multiply_transposed_packed if record.transpose else multiply_packed
    return multiply(kernel, record, record.x, config), ()


def multiply(kernel: Any, record: QuantizedMatmul, rows: jax.Array, config: TpuQuantized) -> jax.Array:
    """Runs a kernel on rows padded to whole registers: arrays with fewer rows have another layout in memory."""
    spec, count = make_spec(record, config), rows.shape[0]
    return apply_tensor_scale(
        record, kernel(record, jnp.pad(rows, ((0, spec.padded_rows - count), (0, 0))), spec)[:count]
    )
