"""The token-sparse attention family: every query attends to the keys that it lists by their indices."""

from ejkernel.families.contract import Family
from ejkernel.families.token_sparse_attention.record import FP8_LATENTS, TokenSparseAttention, accumulator, decode_keys
from ejkernel.families.token_sparse_attention.reference import reference
from ejkernel.families.token_sparse_attention.softmax_gradient import (
    SoftmaxGradientTerms,
    sink_gradient,
    softmax_gradient_terms,
)

__all__ = [
    "FAMILY",
    "FP8_LATENTS",
    "SoftmaxGradientTerms",
    "TokenSparseAttention",
    "accumulator",
    "decode_keys",
    "reference",
    "sink_gradient",
    "softmax_gradient_terms",
]

FAMILY = Family(
    name="token_sparse_attention",
    record=TokenSparseAttention,
    head_dims=lambda record: (record.query.shape[-1], record.value_size),
    axes={"output": "b t h v"},
    # Each shard is a separate call: indices are split with the queries, and all keys are present.
    shardable="bthg",
    aligned=(("h", "g"),),
    reference=reference,
    invariances=lambda record: frozenset({"batch", "padding", "chunking"}),
    lse="b h t",
)
