"""The CUDA backend: CUDA C++ kernels called as XLA FFI handlers, and cuDNN's fused attention, on NVIDIA GPUs.

Importing this module loads no shared library. What a kernel needs is data in its `Implementation`, so that on a machine
without CUDA, or in an installation without compiled kernels, the call is refused with a reason and the import succeeds.
"""

from ejkernel.ops import hookimpl
from ejkernel.ops.model import Implementation
from ejkernel_cuda import (
    channel_gates,
    delta_rule,
    dense_decode,
    grouped_sparse_attention,
    lightning_indexer,
    paged_codes,
    paged_decode,
    quantized_matmul,
    recurrent_step,
    selective_scan,
    tiled_attention,
    token_sparse_attention,
)


@hookimpl
def ejkernel_implementations() -> tuple[Implementation, ...]:
    """Return the implementations that this package registers."""
    decode_implementations = (
        *dense_decode.IMPLEMENTATIONS,
        *paged_decode.IMPLEMENTATIONS,
        *paged_codes.IMPLEMENTATIONS,
    )
    matmul_implementations = quantized_matmul.IMPLEMENTATIONS
    recurrence_implementations = (
        *recurrent_step.IMPLEMENTATIONS,
        *delta_rule.IMPLEMENTATIONS,
        *channel_gates.IMPLEMENTATIONS,
        *selective_scan.IMPLEMENTATIONS,
    )
    return (
        *tiled_attention.implementations(),
        *token_sparse_attention.IMPLEMENTATIONS,
        *grouped_sparse_attention.IMPLEMENTATIONS,
        *lightning_indexer.IMPLEMENTATIONS,
        *decode_implementations,
        *matmul_implementations,
        *recurrence_implementations,
    )
