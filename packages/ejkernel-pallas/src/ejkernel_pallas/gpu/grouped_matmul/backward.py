"""Backward pass of the grouped matmul on Hopper; the formulas are in `ejkernel_xla.grouped_matmul.backward`."""

import dataclasses

import jax

from ejkernel.types.pullback import Pullback
from ejkernel_pallas.gpu.grouped_matmul.config import (
    HopperGroupedBackward,
)
from ejkernel_pallas.gpu.grouped_matmul.forward import multiply_by_group
from ejkernel_pallas.gpu.grouped_matmul.kernels.grouped_matmul import grouped_matmul_kernel
from ejkernel_pallas.gpu.grouped_matmul.kernels.launch import launch_matrix_gradients
from ejkernel_pallas.gpu.grouped_matmul.plan import pad_rows, remove_padding
from ejkernel_pallas.gpu.grouped_matmul.spec import (
    make_spec,
)


def backward(pullback: Pullback, params: HopperGroupedBackward) -> dict[str, jax.Array]:
    """Returns the gradients of the requested fields of a record.

    Args:
        pullback: Record, cotangent [M, N], and the names of the requested fields.
        params: Tile sizes and stages of both kernels.

    Raises:
        ValueError: A tile size is not valid for a kernel.

    Returns:
        The gradient of each requested field, in its shape and dtype.
    """
    # Gradients of unassigned rows are 0, whatever the output has there.
    record, gradients = dataclasses.replace(pullback.record, left_over="zero"), dict[str, jax.Array]()
    rows = record.lhs.shape[0]
    record = dataclasses.replace(record, lhs=pad_rows(record.lhs))
    cotangent = pad_rows(pullback.cotangent.astype(record.lhs.dtype))
    spec = make_spec(record, params, record.lhs.dtype)
    if "lhs" in pullback.grad_fields:
        transposed_spec = dataclasses.replace(
            spec,
            contracted_size=spec.num_columns,
            num_columns=spec.contracted_size,
            matrices_are_transposed=not spec.matrices_are_transposed,
        )
        gradient = multiply_by_group(grouped_matmul_kernel, transposed_spec, cotangent, record)
        gradients["lhs"] = remove_padding(gradient, rows)
    if "rhs" in pullback.grad_fields:
        operands = (cotangent, record.lhs) if record.transpose_rhs else (record.lhs, cotangent)
        output_sizes = {"contracted_size": operands[0].shape[1], "num_columns": operands[1].shape[1]}
        drhs_spec = make_spec(record, params.rhs_gradient_config, record.rhs.dtype)
        gradients["rhs"] = launch_matrix_gradients(dataclasses.replace(drhs_spec, **output_sizes), *operands, record)
    return gradients
