"""The public operations: functions, and classes for code that carries operations around as objects."""

from ejkernel.modules.operations.chunked_prefill_paged_decode import (
    ChunkedPrefillPagedDecode,
    chunked_prefill_paged_decode,
)
from ejkernel.modules.operations.configs import (
    BwdParams,
    ChunkedPrefillPagedDecodeConfig,
    DecodeAttentionConfig,
    FlashAttentionConfig,
    FwdParams,
    GatedDeltaRuleConfig,
    GLAttentionConfig,
    GroupedMatmulConfig,
    KernelDeltaAttentionConfig,
    LightningAttentionConfig,
    MeanPoolingConfig,
    PageAttentionConfig,
    PrefillPageAttentionConfig,
    RaggedDecodeAttentionConfig,
    RaggedGatedDeltaRuleConfig,
    RaggedPageAttentionv2Config,
    RaggedPageAttentionv3Config,
    RecurrentAttentionConfig,
    StateSpaceV2Config,
    UnifiedAttentionConfig,
)
from ejkernel.modules.operations.decode_attention import DecodeAttention, decode_attention
from ejkernel.modules.operations.flash_attention import FlashAttention, flash_attention
from ejkernel.modules.operations.gated_delta_rule import GatedDeltaRule, gated_delta_rule, gdr_attention
from ejkernel.modules.operations.gated_linear_attention import (
    GLAttention,
    gated_linear_attention,
    gla_attention,
    recurrent_gla,
)
from ejkernel.modules.operations.grouped_matmul import GroupedMatmul, grouped_matmul
from ejkernel.modules.operations.kernel_delta_attention import (
    KernelDeltaAttention,
    kda_attention,
    kda_decay,
    kernel_delta_attention,
)
from ejkernel.modules.operations.lightning_attention import LightningAttention, lightning_attention, lightning_attn
from ejkernel.modules.operations.mean_pooling import MeanPooling, mean_pooling
from ejkernel.modules.operations.page_attention import PageAttention, page_attention
from ejkernel.modules.operations.prefill_page_attention import PrefillPageAttention, prefill_page_attention
from ejkernel.modules.operations.ragged_decode_attention import RaggedDecodeAttention, ragged_decode_attention
from ejkernel.modules.operations.ragged_gated_delta_rule import RaggedGatedDeltaRule, ragged_gated_delta_rule
from ejkernel.modules.operations.ragged_page_attention_v2 import (
    RaggedPageAttention,
    RaggedPageAttentionv2,
    ragged_page_attention,
    ragged_page_attention_v2,
)
from ejkernel.modules.operations.ragged_page_attention_v3 import RaggedPageAttentionv3, ragged_page_attention_v3
from ejkernel.modules.operations.recurrent_attention import RecurrentAttention, recurrent, recurrent_attention
from ejkernel.modules.operations.state_space_v2 import StateSpaceV2, state_space_v2
from ejkernel.modules.operations.unified_attention import UnifiedAttention, unified_attention
from ejkernel.ops.execution.executor import create_default_executor

__all__ = [
    "BwdParams",
    "ChunkedPrefillPagedDecode",
    "ChunkedPrefillPagedDecodeConfig",
    "DecodeAttention",
    "DecodeAttentionConfig",
    "FlashAttention",
    "FlashAttentionConfig",
    "FwdParams",
    "GLAttention",
    "GLAttentionConfig",
    "GatedDeltaRule",
    "GatedDeltaRuleConfig",
    "GroupedMatmul",
    "GroupedMatmulConfig",
    "KernelDeltaAttention",
    "KernelDeltaAttentionConfig",
    "LightningAttention",
    "LightningAttentionConfig",
    "MeanPooling",
    "MeanPoolingConfig",
    "PageAttention",
    "PageAttentionConfig",
    "PrefillPageAttention",
    "PrefillPageAttentionConfig",
    "RaggedDecodeAttention",
    "RaggedDecodeAttentionConfig",
    "RaggedGatedDeltaRule",
    "RaggedGatedDeltaRuleConfig",
    "RaggedPageAttention",
    "RaggedPageAttentionv2",
    "RaggedPageAttentionv2Config",
    "RaggedPageAttentionv3",
    "RaggedPageAttentionv3Config",
    "RecurrentAttention",
    "RecurrentAttentionConfig",
    "StateSpaceV2",
    "StateSpaceV2Config",
    "UnifiedAttention",
    "UnifiedAttentionConfig",
    "chunked_prefill_paged_decode",
    "create_default_executor",
    "decode_attention",
    "flash_attention",
    "gated_delta_rule",
    "gated_linear_attention",
    "gdr_attention",
    "gla_attention",
    "grouped_matmul",
    "kda_attention",
    "kda_decay",
    "kernel_delta_attention",
    "lightning_attention",
    "lightning_attn",
    "mean_pooling",
    "page_attention",
    "prefill_page_attention",
    "ragged_decode_attention",
    "ragged_gated_delta_rule",
    "ragged_page_attention",
    "ragged_page_attention_v2",
    "ragged_page_attention_v3",
    "recurrent",
    "recurrent_attention",
    "recurrent_gla",
    "state_space_v2",
    "unified_attention",
]
