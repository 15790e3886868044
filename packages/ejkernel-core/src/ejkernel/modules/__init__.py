"""The public operations: functions, and classes for code that carries operations around as objects.

A name is imported when it is first used, and with it only the operation it belongs to. The table of operations is
`EXPORTS` of `ejkernel.modules.operations`; the imports below are what type checkers and the documentation read.
"""

import importlib
from typing import TYPE_CHECKING, Any

from ejkernel.modules.operations import EXPORTS

if TYPE_CHECKING:
    from ejkernel.modules.operations.attention import Attention, attention
    from ejkernel.modules.operations.blocksparse_attention import BlockSparseAttention, blocksparse_attention
    from ejkernel.modules.operations.causal_conv1d import CausalConv1d, causal_conv1d
    from ejkernel.modules.operations.chunked_prefill_paged_decode import (
        ChunkedPrefillPagedDecode,
        chunked_prefill_paged_decode,
    )
    from ejkernel.modules.operations.configs import (
        AttentionConfig,
        BlockSparseAttentionConfig,
        BwdParams,
        CausalConv1dConfig,
        ChunkedPrefillPagedDecodeConfig,
        DecodeAttentionConfig,
        ExpertRoutingConfig,
        FlashAttentionConfig,
        FlashMLAConfig,
        FwdParams,
        GatedDeltaRuleConfig,
        GatedGroupedMatmulConfig,
        GatherReduceConfig,
        GLAttentionConfig,
        GroupedMatmulConfig,
        GRUConfig,
        KernelDeltaAttentionConfig,
        LightningAttentionConfig,
        LSTMConfig,
        MeanPoolingConfig,
        MLADecodeConfig,
        MultiLatentRaggedPageAttentionConfig,
        MultiLatentRaggedPageAttentionV2Config,
        NativeSparseAttentionConfig,
        PageAttentionConfig,
        PrefillPageAttentionConfig,
        QuantizedMatmulConfig,
        RaggedDecodeAttentionConfig,
        RaggedGatedDeltaRuleConfig,
        RaggedPageAttentionv2Config,
        RaggedPageAttentionv3Config,
        RecurrentAttentionConfig,
        RingAttentionConfig,
        RNNConfig,
        ScaledDotProductAttentionConfig,
        StateSpaceV1Config,
        StateSpaceV2Config,
        UnifiedAttentionConfig,
    )
    from ejkernel.modules.operations.decode_attention import DecodeAttention, decode_attention
    from ejkernel.modules.operations.expert_routing import ExpertRouting, expert_routing
    from ejkernel.modules.operations.flash_attention import FlashAttention, flash_attention
    from ejkernel.modules.operations.flash_mla import FlashMLA, flash_mla, mla_attention
    from ejkernel.modules.operations.gated_delta_rule import GatedDeltaRule, gated_delta_rule, gdr_attention
    from ejkernel.modules.operations.gated_grouped_matmul import GatedGroupedMatmul, gated_grouped_matmul
    from ejkernel.modules.operations.gated_linear_attention import (
        GLAttention,
        gated_linear_attention,
        gla_attention,
        recurrent_gla,
    )
    from ejkernel.modules.operations.gather_reduce import GatherReduce, gather_reduce
    from ejkernel.modules.operations.grouped_matmul import GroupedMatmul, grouped_matmul
    from ejkernel.modules.operations.gru import GRU, gru
    from ejkernel.modules.operations.kernel_delta_attention import (
        KernelDeltaAttention,
        kda_attention,
        kda_decay,
        kernel_delta_attention,
    )
    from ejkernel.modules.operations.lightning_attention import LightningAttention, lightning_attention, lightning_attn
    from ejkernel.modules.operations.lstm import LSTM, lstm
    from ejkernel.modules.operations.mean_pooling import MeanPooling, mean_pooling
    from ejkernel.modules.operations.mla_decode import MLADecode, flash_mla_decode, mla_decode
    from ejkernel.modules.operations.multi_latent_ragged_page_attention import (
        MultiLatentRaggedPageAttention,
        multi_latent_ragged_page_attention,
    )
    from ejkernel.modules.operations.multi_latent_ragged_page_attention_v2 import (
        MultiLatentRaggedPageAttentionV2,
        multi_latent_ragged_page_attention_v2,
    )
    from ejkernel.modules.operations.native_sparse_attention import NativeSparseAttention, native_sparse_attention
    from ejkernel.modules.operations.page_attention import PageAttention, page_attention
    from ejkernel.modules.operations.prefill_page_attention import PrefillPageAttention, prefill_page_attention
    from ejkernel.modules.operations.quantized_matmul import QuantizedMatmul, quantized_matmul
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
    from ejkernel.modules.operations.ring_attention import RingAttention, ring_attention
    from ejkernel.modules.operations.rnn import RNN, rnn
    from ejkernel.modules.operations.scaled_dot_product_attention import (
        ScaledDotProductAttention,
        scaled_dot_product_attention,
    )
    from ejkernel.modules.operations.state_space_v1 import StateSpaceV1, state_space_v1
    from ejkernel.modules.operations.state_space_v2 import StateSpaceV2, state_space_v2
    from ejkernel.modules.operations.unified_attention import UnifiedAttention, unified_attention
    from ejkernel.ops.execution.executor import create_default_executor

__all__ = [
    "GRU",
    "LSTM",
    "RNN",
    "Attention",
    "AttentionConfig",
    "BlockSparseAttention",
    "BlockSparseAttentionConfig",
    "BwdParams",
    "CausalConv1d",
    "CausalConv1dConfig",
    "ChunkedPrefillPagedDecode",
    "ChunkedPrefillPagedDecodeConfig",
    "DecodeAttention",
    "DecodeAttentionConfig",
    "ExpertRouting",
    "ExpertRoutingConfig",
    "FlashAttention",
    "FlashAttentionConfig",
    "FlashMLA",
    "FlashMLAConfig",
    "FwdParams",
    "GLAttention",
    "GLAttentionConfig",
    "GRUConfig",
    "GatedDeltaRule",
    "GatedDeltaRuleConfig",
    "GatedGroupedMatmul",
    "GatedGroupedMatmulConfig",
    "GatherReduce",
    "GatherReduceConfig",
    "GroupedMatmul",
    "GroupedMatmulConfig",
    "KernelDeltaAttention",
    "KernelDeltaAttentionConfig",
    "LSTMConfig",
    "LightningAttention",
    "LightningAttentionConfig",
    "MLADecode",
    "MLADecodeConfig",
    "MeanPooling",
    "MeanPoolingConfig",
    "MultiLatentRaggedPageAttention",
    "MultiLatentRaggedPageAttentionConfig",
    "MultiLatentRaggedPageAttentionV2",
    "MultiLatentRaggedPageAttentionV2Config",
    "NativeSparseAttention",
    "NativeSparseAttentionConfig",
    "PageAttention",
    "PageAttentionConfig",
    "PrefillPageAttention",
    "PrefillPageAttentionConfig",
    "QuantizedMatmul",
    "QuantizedMatmulConfig",
    "RNNConfig",
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
    "RingAttention",
    "RingAttentionConfig",
    "ScaledDotProductAttention",
    "ScaledDotProductAttentionConfig",
    "StateSpaceV1",
    "StateSpaceV1Config",
    "StateSpaceV2",
    "StateSpaceV2Config",
    "UnifiedAttention",
    "UnifiedAttentionConfig",
    "attention",
    "blocksparse_attention",
    "causal_conv1d",
    "chunked_prefill_paged_decode",
    "create_default_executor",
    "decode_attention",
    "expert_routing",
    "flash_attention",
    "flash_mla",
    "flash_mla_decode",
    "gated_delta_rule",
    "gated_grouped_matmul",
    "gated_linear_attention",
    "gather_reduce",
    "gdr_attention",
    "gla_attention",
    "grouped_matmul",
    "gru",
    "kda_attention",
    "kda_decay",
    "kernel_delta_attention",
    "lightning_attention",
    "lightning_attn",
    "lstm",
    "mean_pooling",
    "mla_attention",
    "mla_decode",
    "multi_latent_ragged_page_attention",
    "multi_latent_ragged_page_attention_v2",
    "native_sparse_attention",
    "page_attention",
    "prefill_page_attention",
    "quantized_matmul",
    "ragged_decode_attention",
    "ragged_gated_delta_rule",
    "ragged_page_attention",
    "ragged_page_attention_v2",
    "ragged_page_attention_v3",
    "recurrent",
    "recurrent_attention",
    "recurrent_gla",
    "ring_attention",
    "rnn",
    "scaled_dot_product_attention",
    "state_space_v1",
    "state_space_v2",
    "unified_attention",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_home(name)), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def _home(name: str) -> str:
    """The module that defines a public name."""
    if name == "create_default_executor":
        return "ejkernel.ops.execution.executor"
    homes = {public: module for module, names in EXPORTS.items() for public in names}
    return f"ejkernel.modules.operations.{homes.get(name, 'configs')}"
