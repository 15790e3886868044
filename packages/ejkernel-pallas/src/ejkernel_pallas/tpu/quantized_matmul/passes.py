"""Both passes of the quantised matmul: rows times the packed matrix, and times its transpose."""

from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.families.quantized_matmul import QuantizedMatmul, finished
from ejkernel.types.pullback import Pullback
from ejkernel_pallas.tpu.quantized_matmul.kernels import over_rows, over_words
from ejkernel_pallas.tpu.quantized_matmul.spec import make_spec
from ejkernel_pallas.tpu.quantized_matmul.tiles import TpuQuantized


def forward(record: QuantizedMatmul, config: TpuQuantized) -> tuple[jax.Array, tuple[()]]:
    """The output of a record.

    Args:
        record: The canonical arguments.
        config: Tiles.

    Returns:
        [M, N] in x's dtype. There are no residuals.
    """
    run = over_words if record.transpose else over_rows
    return _multiplied(run, record, record.x, config), ()


def backward(pullback: Pullback, config: TpuQuantized) -> dict[str, jax.Array]:
    """The gradient of x: the cotangent times the transposed matrix, by the kernel of the other layout.

    Args:
        pullback: Record, cotangent [M, N], and the wanted names.
        config: Tiles.

    Returns:
        [M, K] in x's dtype, if it is wanted.
    """
    record: QuantizedMatmul = pullback.record
    run = over_rows if record.transpose else over_words
    cotangent = pullback.cotangent.astype(record.x.dtype)
    return {name: _multiplied(run, record, cotangent, config) for name in sorted(pullback.wanted)}


def _multiplied(run: Any, record: QuantizedMatmul, rows: jax.Array, config: TpuQuantized) -> jax.Array:
    """Runs a kernel on rows, filled up to whole registers: arrays of fewer have another layout in memory."""
    spec, count = make_spec(record, config), rows.shape[0]
    return finished(record, run(record, jnp.pad(rows, ((0, spec.rows - count), (0, 0))), spec)[:count])
