"""Forward pass of the quantised matmul in the matrix's order."""

from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.arithmetic import cdiv
from ejkernel.families.grouped_matmul import GroupedMatmul
from ejkernel.families.quantized_matmul import QuantizedMatmul, apply_tensor_scale
from ejkernel.ops.device import current_device
from ejkernel.planning.quantized_formats import NF4
from ejkernel_triton.grouped_matmul import config as grouped_config
from ejkernel_triton.grouped_matmul.forward import forward as grouped_forward
from ejkernel_triton.launch import ShapeDtype, launch
from ejkernel_triton.quantized_matmul.ordered.config import OrderedTiles
from ejkernel_triton.quantized_matmul.ordered.spec import OrderedSpec, make_spec


def forward(record: QuantizedMatmul, config: OrderedTiles) -> tuple[jax.Array, tuple[()]]:
    """Returns the output of a record.

    Args:
        record: The canonical arguments.
        config: Tiles, warps and stages.

    Returns:
        [M, N] in x's dtype. There are no residuals.
    """
    multiply = _multiply_dequantized if config.dequantize_first else _multiply_packed
    return apply_tensor_scale(record, multiply(record, config)), ()


def _multiply_packed(record: QuantizedMatmul, config: OrderedTiles) -> jax.Array:
    """Returns x times the matrix, which the kernel dequantises in registers, [M, N]."""
    from ejkernel_triton.quantized_matmul.ordered.kernels.ordered_matmul import ordered_matmul_kernel

    spec = make_spec(record, config)
    size = spec.R if spec.TRANSPOSED else spec.W * spec.CODES_PER_WORD
    tile_size = spec.BLOCK_R if spec.TRANSPOSED else spec.BLOCK_W * spec.CODES_PER_WORD
    (output,) = launch(
        ordered_matmul_kernel,
        (record.x[None], *_matrix_arrays(record, spec)),
        (ShapeDtype((1, spec.M, size), _output_dtype(record, spec)),),
        batch=1,
        grid=cdiv(size, tile_size) * cdiv(spec.M, spec.BLOCK_M),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        constants={"spec": spec},
    )
    return output[0]


def _multiply_dequantized(record: QuantizedMatmul, config: OrderedTiles) -> jax.Array:
    """Returns x times the matrix, which one kernel dequantises and the grouped matmul's multiplies, [M, N]."""
    from ejkernel_triton.quantized_matmul.ordered.kernels.dequantize_matrix import dequantize_matrix_kernel

    spec = make_spec(record, config)
    (matrix,) = launch(
        dequantize_matrix_kernel,
        _matrix_arrays(record, spec),
        (ShapeDtype((1, spec.R, spec.W * spec.CODES_PER_WORD), record.x.dtype),),
        batch=1,
        grid=cdiv(spec.R, spec.BLOCK_R) * cdiv(spec.W, spec.BLOCK_W),
        num_warps=config.num_warps,
        num_stages=1,
        constants={"spec": spec},
    )
    product = GroupedMatmul(
        lhs=record.x,
        rhs=matrix,
        group_sizes=jnp.full(1, spec.M, jnp.int32),
        out_dtype=_output_dtype(record, spec),
        transpose_rhs=spec.TRANSPOSED,
        precision=record.precision,
        left_over="undefined",
    )
    return grouped_forward(product, grouped_config.batch_invariant(product, current_device(), "forward"))[0]


def _matrix_arrays(record: QuantizedMatmul, spec: OrderedSpec) -> tuple[jax.Array | None, ...]:
    """Returns words, scales, zeros and the table of codes, as the kernels take them."""
    zero_points = None if record.zeros is None else record.zeros[None]
    nf4_table = jnp.asarray(NF4, jnp.float32)[None] if spec.HAS_CODE_TABLE else None
    return record.packed[None], record.scales[None], zero_points, nf4_table


def _output_dtype(record: QuantizedMatmul, spec: OrderedSpec) -> Any:
    """Returns the dtype that the kernels store: a tensor scale multiplies float32 sums before they are rounded, and the
    interpreter truncates.
    """
    return jnp.dtype(jnp.float32) if record.tensor_scale is not None or spec.WIDEN_TO_FLOAT32 else record.x.dtype
