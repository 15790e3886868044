"""The FFI calls of the quantised matmul's kernels (csrc/quantized_matmul)."""

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.families.quantized_matmul import QuantizedMatmul, columns
from ejkernel_cuda.library import registered
from ejkernel_cuda.quantized_matmul.config import (
    MAX_SPLITS,
    WARPGROUP_UNIT,
    QuantizedSplits,
    has_row_warpgroups,
    has_warpgroups,
    has_whole_columns,
)


def forward(record: QuantizedMatmul, config: QuantizedSplits) -> tuple[jax.Array, tuple[()]]:
    """Returns the output of a record.

    Args:
        record: The canonical arguments.
        config: The split-K configuration.

    Returns:
        [M, N] in x's dtype. There are no residuals.
    """
    if has_warpgroups(record):
        return _warpgroups(record, config), ()
    if has_row_warpgroups(record):
        return _rows_first(record, config), ()
    whole = config.splits == 0 and has_whole_columns(record)
    assert record.zeros is not None  # set for affine codes
    call = jax.ffi.ffi_call(
        registered("ejkernel_quantized_matmul"),
        jax.ShapeDtypeStruct((record.x.shape[0], columns(record)), record.x.dtype),
        # Each batch element has its own weights, so each is a separate call.
        vmap_method="sequential",
    )
    output = call(
        record.x,
        record.packed,
        record.scales,
        record.zeros,
        log_group=np.int32(record.format.group_size.bit_length() - 1),
        splits=np.int32(0 if whole else max(1, min(config.splits, MAX_SPLITS))),
        transpose=record.transpose,
    )
    return output, ()


def _warpgroups(record: QuantizedMatmul, config: QuantizedSplits) -> jax.Array:
    """Returns the output, computed by the WGMMA kernel for `transpose`."""
    assert record.zeros is not None
    rows, k = record.x.shape
    call = jax.ffi.ffi_call(
        registered("ejkernel_quantized_warpgroups"),
        (
            jax.ShapeDtypeStruct((rows, columns(record)), record.x.dtype),
            # A first kernel writes x here, permuted for the products.
            jax.ShapeDtypeStruct((arranged_bytes(rows, k),), jnp.uint8),
        ),
        vmap_method="sequential",
    )
    splits = np.int32(max(1, min(config.splits, MAX_SPLITS)))
    output, _ = call(record.x, record.packed, record.scales, record.zeros, splits=splits)
    return output


def _rows_first(record: QuantizedMatmul, config: QuantizedSplits) -> jax.Array:
    """Returns the output, computed by the WGMMA kernel without `transpose`, which does not permute x."""
    assert record.zeros is not None
    call = jax.ffi.ffi_call(
        registered("ejkernel_quantized_rows"),
        jax.ShapeDtypeStruct((record.x.shape[0], columns(record)), record.x.dtype),
        vmap_method="sequential",
    )
    splits = np.int32(max(1, min(config.splits, MAX_SPLITS)))
    return call(record.x, record.packed, record.scales, record.zeros, splits=splits)


def arranged_bytes(rows: int, k: int) -> int:
    """Returns the bytes of permuted x and of its sums over groups (csrc/quantized_matmul/warpgroups.cuh)."""
    padded = 32 if rows <= 32 else 64
    return k // WARPGROUP_UNIT * padded * (2 * WARPGROUP_UNIT + 32)
