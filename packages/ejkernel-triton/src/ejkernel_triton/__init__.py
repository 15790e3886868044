"""The Triton backend: kernels for NVIDIA and AMD GPUs, compiled by Triton and called through jax-triton.

Importing this module needs neither Triton nor jax-triton. What a kernel needs is data in its `Implementation`, so that
on a machine without the toolchain a call is refused with the missing module's name, and the import succeeds.

With `TRITON_INTERPRET=1` in the environment, Triton's own switch, the kernels run in Triton's interpreter on any
device, including CPUs: slowly, and with the same results up to rounding.
"""

from ejkernel.ops import hookimpl
from ejkernel.ops.model import Implementation
from ejkernel_triton import (
    causal_convolution,
    cross_entropy,
    expert_routing,
    gated_grouped_matmul,
    gather_reduce,
    grouped_matmul,
    kl_divergence,
    lightning_indexer,
    linear_recurrence,
    paged_attention,
    quantized_matmul,
    ring_attention,
    segment_pooling,
    selected_attention,
    selective_scan,
    tiled_attention,
    token_sparse_attention,
)


@hookimpl
def ejkernel_implementations() -> tuple[Implementation, ...]:
    """Return the implementations that this package registers."""
    return (
        *tiled_attention.implementations(),
        *ring_attention.implementations(),
        *paged_attention.implementations(),
        *selected_attention.implementations(),
        *token_sparse_attention.implementations(),
        *lightning_indexer.implementations(),
        *grouped_matmul.implementations(),
        *quantized_matmul.implementations(),
        *selective_scan.implementations(),
        *linear_recurrence.implementations(),
        *causal_convolution.implementations(),
        *segment_pooling.implementations(),
        *gather_reduce.implementations(),
        *expert_routing.implementations(),
        *gated_grouped_matmul.implementations(),
        *cross_entropy.implementations(),
        *kl_divergence.implementations(),
    )
