"""Implementations in plain XLA: they run on every device and honour every argument, and so are everyone's fallback."""

from ejkernel.ops import Implementation, hookimpl
from ejkernel_xla import (
    attention_weights,
    causal_convolution,
    collective_matmul,
    cross_entropy,
    dense_indexer_loss,
    expert_routing,
    gated_grouped_matmul,
    gather_reduce,
    grouped_matmul,
    indexer_loss,
    kl_divergence,
    lightning_indexer,
    linear_recurrence,
    paged_attention,
    quantized_matmul,
    recurrent_network,
    ring_attention,
    segment_pooling,
    selected_attention,
    selective_scan,
    tiled_attention,
    token_sparse_attention,
    wkv,
)

FAMILIES = (
    linear_recurrence,
    paged_attention,
    tiled_attention,
    attention_weights,
    ring_attention,
    selected_attention,
    lightning_indexer,
    token_sparse_attention,
    indexer_loss,
    dense_indexer_loss,
    segment_pooling,
    grouped_matmul,
    quantized_matmul,
    collective_matmul,
    selective_scan,
    recurrent_network,
    causal_convolution,
    gather_reduce,
    expert_routing,
    gated_grouped_matmul,
    cross_entropy,
    kl_divergence,
    wkv,
)


@hookimpl
def ejkernel_implementations() -> tuple[Implementation, ...]:
    """Returns one implementation for every operation of every family."""
    return tuple(implementation for family in FAMILIES for implementation in family.IMPLEMENTATIONS)
