"""Forward passes of the grouped matmul on Hopper: with 16-bit operands, with 8-bit operands and scales, and with gated
products.
"""

import dataclasses

import jax
import jax.numpy as jnp

from ejkernel.families.gated_grouped_matmul import GatedGroupedMatmul
from ejkernel.families.grouped_matmul import GroupedMatmul
from ejkernel_pallas.gpu.grouped_matmul.config import HopperFp8, HopperGated, HopperGrouped, plain_product_record
from ejkernel_pallas.gpu.grouped_matmul.kernels.gated_grouped_matmul import gated_grouped_matmul_kernel
from ejkernel_pallas.gpu.grouped_matmul.kernels.grouped_matmul import grouped_matmul_kernel
from ejkernel_pallas.gpu.grouped_matmul.kernels.grouped_matmul_fp8 import grouped_matmul_fp8_kernel
from ejkernel_pallas.gpu.grouped_matmul.kernels.launch import RowKernel, launch_row_kernel
from ejkernel_pallas.gpu.grouped_matmul.plan import pad_rows, remove_padding
from ejkernel_pallas.gpu.grouped_matmul.spec import (
    GroupedSpec,
    columns_share_scales,
    make_fp8_spec,
    make_gated_spec,
    make_spec,
)

SCALE_OPERAND_NAMES = ("lhs_scale", "rhs_scale", "same")


def forward(record: GroupedMatmul, params: HopperGrouped) -> tuple[jax.Array, tuple[()]]:
    """Returns the output of a record.

    Args:
        record: The canonical arguments.
        params: Tile sizes and stages.

    Raises:
        ValueError: A tile size is not valid for the kernel.

    Returns:
        [M, N] in the record's `out_dtype`. There are no residuals.
    """
    padded = dataclasses.replace(record, lhs=pad_rows(record.lhs))
    spec = make_spec(padded, params, record.out_dtype)
    output = multiply_by_group(grouped_matmul_kernel, spec, padded.lhs, padded)
    return remove_padding(output, record.lhs.shape[0]), ()


def forward_fp8(record: GroupedMatmul, params: HopperFp8) -> tuple[jax.Array, tuple[()]]:
    """Returns the output of a record of 8-bit rows and matrices with scales.

    Args:
        record: The canonical arguments.
        params: Tile sizes and stages.

    Raises:
        ValueError: A tile size is not valid for the kernel.

    Returns:
        [M, N] in the record's `out_dtype`. There are no residuals.
    """
    assert record.lhs_scale is not None  # a requirement of the kernel
    assert record.rhs_scale is not None
    spec = make_fp8_spec(record, params)
    scales = record.lhs_scale.astype(jnp.float32), record.rhs_scale[:, :, 0].astype(jnp.float32)
    if scales[1].shape[1] > 1:
        scales += (columns_share_scales(scales[1], params.product_n),)
    return multiply_by_group(grouped_matmul_fp8_kernel, spec, record.lhs, record, *scales), ()


def gated_forward(record: GatedGroupedMatmul, params: HopperGated) -> tuple[jax.Array, tuple[()]]:
    """Returns the output of a gated record, whose rows may be gathered.

    Args:
        record: The canonical arguments.
        params: Tile sizes and stages.

    Raises:
        ValueError: A tile size is not valid for the kernel.

    Returns:
        [M, F] in lhs's dtype. There are no residuals.
    """
    rows = (record.lhs if record.indices is None else record.indices).shape[0]
    if record.indices is None:
        record = dataclasses.replace(record, lhs=pad_rows(record.lhs))
    else:
        record = dataclasses.replace(record, indices=pad_rows(record.indices, -1))
    spec = make_gated_spec(record, params)
    assert spec.activation_constants is not None
    rhs, bias = record.rhs, record.rhs_bias
    if spec.activation_constants.views_interleaved_rows_as_pairs:
        # Each row of the gate and that of its factor as one row, which moves no data, and the bias in halves.
        rhs = rhs.reshape(rhs.shape[0], spec.num_columns, 2 * spec.contracted_size)
        bias = None if bias is None else bias.reshape(rhs.shape[0], spec.num_columns, 2).swapaxes(1, 2)
    operands = {"lhs": record.lhs, "rhs": rhs}
    if bias is not None:
        operands["bias"] = bias.astype(jnp.float32).reshape(rhs.shape[0], -1)
    if record.indices is not None:
        operands["indices"] = record.indices
    output = launch_row_kernel(gated_grouped_matmul_kernel, spec, operands, plain_product_record(record))
    return remove_padding(output, rows), ()


def multiply_by_group(
    kernel: RowKernel, spec: GroupedSpec, lhs_rows: jax.Array, record: GroupedMatmul, *scales: jax.Array
) -> jax.Array:
    """Returns rows [M, contracted] times the matrices of their groups. 8-bit operands come with the arrays that
    `SCALE_OPERAND_NAMES` names.
    """
    operands = {
        "lhs": lhs_rows,
        "rhs": record.rhs,
        **dict(zip(SCALE_OPERAND_NAMES[: len(scales)], scales, strict=True)),
    }
    return launch_row_kernel(kernel, spec, operands, record)
