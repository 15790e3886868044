"""The FFI calls of the quantised matmul's kernels (csrc/quantized_matmul)."""

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.families.quantized_matmul import QuantizedMatmul, columns
from ejkernel_cuda.library import register_handler
from ejkernel_cuda.quantized_matmul.config import (
    MAX_SPLITS,
    WGMMA_K_MULTIPLE,
    QuantizedSplits,
    supports_unsplit_k,
    uses_wgmma,
    uses_wgmma_without_transpose,
)


def forward(record: QuantizedMatmul, config: QuantizedSplits) -> tuple[jax.Array, tuple[()]]:
    """Returns the output of a record.

    Args:
        record: The canonical arguments.
        config: The split-K configuration.

    Returns:
        [M, N] in x's dtype. There are no residuals.
    """
    if uses_wgmma(record):
        return _multiply_wgmma(record, config), ()
    if uses_wgmma_without_transpose(record):
        return _multiply_wgmma_without_transpose(record, config), ()
    unsplit_k = config.splits == 0 and supports_unsplit_k(record)
    assert record.zeros is not None  # set for affine codes
    call = jax.ffi.ffi_call(
        register_handler("ejkernel_quantized_matmul"),
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
        splits=np.int32(0 if unsplit_k else max(1, min(config.splits, MAX_SPLITS))),
        transpose=record.transpose,
    )
    return output, ()


def _multiply_wgmma(record: QuantizedMatmul, config: QuantizedSplits) -> jax.Array:
    """Returns the output, computed by the WGMMA kernel for `transpose`."""
    assert record.zeros is not None
    rows, k = record.x.shape
    call = jax.ffi.ffi_call(
        register_handler("ejkernel_quantized_warpgroups"),
        (
            jax.ShapeDtypeStruct((rows, columns(record)), record.x.dtype),
            # A first kernel writes x here, permuted for the products.
            jax.ShapeDtypeStruct((permuted_x_workspace_bytes(rows, k),), jnp.uint8),
        ),
        vmap_method="sequential",
    )
    splits = np.int32(max(1, min(config.splits, MAX_SPLITS)))
    output, _ = call(record.x, record.packed, record.scales, record.zeros, splits=splits)
    return output


def _multiply_wgmma_without_transpose(record: QuantizedMatmul, config: QuantizedSplits) -> jax.Array:
    """Returns the output, computed by the WGMMA kernel without `transpose`, which does not permute x."""
    assert record.zeros is not None
    call = jax.ffi.ffi_call(
        register_handler("ejkernel_quantized_rows"),
        jax.ShapeDtypeStruct((record.x.shape[0], columns(record)), record.x.dtype),
        vmap_method="sequential",
    )
    splits = np.int32(max(1, min(config.splits, MAX_SPLITS)))
    return call(record.x, record.packed, record.scales, record.zeros, splits=splits)


def permuted_x_workspace_bytes(rows: int, k: int) -> int:
    """Returns the bytes of permuted x and of its sums over groups (csrc/quantized_matmul/warpgroups.cuh)."""
    padded_rows = 32 if rows <= 32 else 64
    return k // WGMMA_K_MULTIPLE * padded_rows * (2 * WGMMA_K_MULTIPLE + 32)
