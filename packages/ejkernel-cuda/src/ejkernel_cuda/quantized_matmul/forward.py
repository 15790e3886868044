"""The calls of the quantised matmul's kernels (csrc/quantized_matmul.cu and csrc/quantized_warpgroups.cu)."""

import jax
import numpy as np

from ejkernel.families.quantized_matmul import QuantizedMatmul, columns
from ejkernel_cuda.library import registered
from ejkernel_cuda.quantized_matmul.splits import MAX_SPLITS, QuantizedSplits, has_warpgroups, has_whole_columns


def forward(record: QuantizedMatmul, config: QuantizedSplits) -> tuple[jax.Array, tuple[()]]:
    """The output of a record.

    Args:
        record: The canonical arguments.
        config: Splits.

    Returns:
        [M, N] in x's dtype. There are no residuals.
    """
    if has_warpgroups(record):
        return _warpgroups(record, config), ()
    whole = config.splits == 0 and has_whole_columns(record)
    assert record.zeros is not None  # affine codes have them
    call = jax.ffi.ffi_call(
        registered("ejkernel_quantized_matmul"),
        jax.ShapeDtypeStruct((record.x.shape[0], columns(record)), record.x.dtype),
        # The elements of a batch have weights of their own, so each is a call.
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
    """The output, from products of warpgroups."""
    assert record.zeros is not None
    call = jax.ffi.ffi_call(
        registered("ejkernel_quantized_warpgroups"),
        jax.ShapeDtypeStruct((record.x.shape[0], columns(record)), record.x.dtype),
        vmap_method="sequential",
    )
    splits = np.int32(max(1, min(config.splits, MAX_SPLITS)))
    return call(record.x, record.packed, record.scales, record.zeros, splits=splits)
