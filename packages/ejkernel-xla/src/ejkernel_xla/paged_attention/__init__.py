"""Paged softmax attention in XLA: an online softmax that gathers only the tiles of keys that some query row attends."""

import functools

from ejkernel.modules.operations import configs
from ejkernel.ops import ConfigSpace, Implementation, Requires
from ejkernel.ops.config.params import FwdParams
from ejkernel_xla.paged_attention import tiles

COMMON = frozenset({"softmax_aux", "sliding_window", "logits_soft_cap"})
NEW = frozenset({"new_keys", "new_values"})
LATENT = frozenset({"latent", "new_keys", "num_seqs", "value_scale", "sliding_window", "logits_soft_cap"})

OPS: dict[str, tuple[type, frozenset[str]]] = {
    "page_attention": (configs.PageAttentionConfig, COMMON),
    "decode_attention": (configs.DecodeAttentionConfig, COMMON),
    "ragged_decode_attention": (FwdParams, COMMON | {"kv_starts"}),
    "prefill_page_attention": (configs.PrefillPageAttentionConfig, COMMON),
    "unified_attention": (
        configs.UnifiedAttentionConfig,
        COMMON | {"alibi_slopes", "qq_bias", "causal", "shared_prefix"},
    ),
    "chunked_prefill_paged_decode": (
        configs.ChunkedPrefillPagedDecodeConfig,
        COMMON | NEW | {"alibi_slopes", "causal"},
    ),
    "ragged_page_attention_v2": (configs.RaggedPageAttentionv2Config, COMMON | {"num_seqs", "compute_dtype"}),
    "ragged_page_attention_v3": (configs.RaggedPageAttentionv3Config, COMMON | NEW | {"num_seqs", "value_scale"}),
    "multi_latent_ragged_page_attention": (configs.MultiLatentRaggedPageAttentionConfig, LATENT),
    "multi_latent_ragged_page_attention_v2": (configs.MultiLatentRaggedPageAttentionV2Config, LATENT),
}
"""For every operation, the configuration its kernel reads, and the optional fields that its records can have."""


def _implementation(op: str, config: type, handles: frozenset[str]) -> Implementation:
    return Implementation(
        family="paged_attention",
        only=frozenset({op}),
        name="xla",
        platform="xla",
        backend="any",
        forward="ejkernel_xla.paged_attention.forward:forward",
        requires=Requires(
            devices=frozenset({"cpu", "gpu", "tpu"}),
            dtypes=frozenset({"float16", "bfloat16", "float32", "float64"}),
            handles=handles,
        ),
        config=ConfigSpace(
            reads=frozenset({"q_blocksize", "kv_blocksize", "seq_blocksize"}),
            heuristic=functools.partial(tiles.heuristic, config=config),
            candidates=functools.partial(tiles.candidates, config=config),
        ),
    )


IMPLEMENTATIONS = tuple(_implementation(op, config, handles) for op, (config, handles) in OPS.items())
