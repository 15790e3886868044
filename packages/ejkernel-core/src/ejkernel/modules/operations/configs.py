"""One configuration class an operation: choices that change its speed and never its answer (beyond rounding)."""

import dataclasses

from ejkernel.modules.operations.configuration.attention import (
    AttentionConfig,
    BlockSparseAttentionConfig,
    ScaledDotProductAttentionConfig,
    TiledAttentionConfig,
)
from ejkernel.modules.operations.configuration.latent import (
    DeepSeekAttentionConfig,
    FlashMLAConfig,
    LightningIndexerConfig,
    LightningIndexerDenseLossConfig,
    LightningIndexerLossConfig,
    MLADecodeConfig,
    NativeSparseAttentionConfig,
    TokenSparseAttentionConfig,
)
from ejkernel.modules.operations.configuration.paged import (
    ChunkedPrefillPagedDecodeConfig,
    DecodeAttentionConfig,
    MultiLatentRaggedPageAttentionConfig,
    MultiLatentRaggedPageAttentionV2Config,
    PageAttentionConfig,
    PagedAttentionConfig,
    PrefillPageAttentionConfig,
    RaggedDecodeAttentionConfig,
    RaggedPageAttentionv2Config,
    RaggedPageAttentionv2TurboQuantConfig,
    RaggedPageAttentionv3Config,
    RaggedPageAttentionv3TurboQuantConfig,
    UnifiedAttentionConfig,
)
from ejkernel.modules.operations.configuration.recurrence import (
    GatedDeltaRuleConfig,
    GLAttentionConfig,
    KernelDeltaAttentionConfig,
    LightningAttentionConfig,
    RaggedGatedDeltaRuleConfig,
    RecurrentAttentionConfig,
    RWKV4Config,
    RWKV6Config,
    RWKV7Config,
    RWKV7MulConfig,
    StateSpaceV2Config,
)
from ejkernel.modules.operations.configuration.sequence import (
    AllGatherMatmulConfig,
    CausalConv1dConfig,
    ExpertRoutingConfig,
    FusedCrossEntropyConfig,
    FusedKLDivergenceConfig,
    GatedGroupedMatmulConfig,
    GatherReduceConfig,
    GroupedMatmulConfig,
    GRUConfig,
    LSTMConfig,
    MeanPoolingConfig,
    QuantizedMatmulConfig,
    ReduceScatterMatmulConfig,
    RNNConfig,
    StateSpaceV1Config,
)
from ejkernel.ops.params import BaseOperationConfig, BwdParams, FwdParams

__all__ = [
    "AllGatherMatmulConfig",
    "AttentionConfig",
    "BaseOperationConfig",
    "BlockSparseAttentionConfig",
    "BwdParams",
    "CausalConv1dConfig",
    "ChunkedPrefillPagedDecodeConfig",
    "DecodeAttentionConfig",
    "DeepSeekAttentionConfig",
    "ExpertRoutingConfig",
    "FlashAttentionConfig",
    "FlashMLAConfig",
    "FusedCrossEntropyConfig",
    "FusedKLDivergenceConfig",
    "FwdParams",
    "GLAttentionConfig",
    "GRUConfig",
    "GatedDeltaRuleConfig",
    "GatedGroupedMatmulConfig",
    "GatherReduceConfig",
    "GroupedMatmulConfig",
    "KernelDeltaAttentionConfig",
    "LSTMConfig",
    "LightningAttentionConfig",
    "LightningIndexerConfig",
    "LightningIndexerDenseLossConfig",
    "LightningIndexerLossConfig",
    "MLADecodeConfig",
    "MeanPoolingConfig",
    "MultiLatentRaggedPageAttentionConfig",
    "MultiLatentRaggedPageAttentionV2Config",
    "NativeSparseAttentionConfig",
    "PageAttentionConfig",
    "PagedAttentionConfig",
    "PrefillPageAttentionConfig",
    "QuantizedMatmulConfig",
    "RNNConfig",
    "RWKV4Config",
    "RWKV6Config",
    "RWKV7Config",
    "RWKV7MulConfig",
    "RaggedDecodeAttentionConfig",
    "RaggedGatedDeltaRuleConfig",
    "RaggedPageAttentionv2Config",
    "RaggedPageAttentionv2TurboQuantConfig",
    "RaggedPageAttentionv3Config",
    "RaggedPageAttentionv3TurboQuantConfig",
    "RecurrentAttentionConfig",
    "ReduceScatterMatmulConfig",
    "RingAttentionConfig",
    "ScaledDotProductAttentionConfig",
    "StateSpaceV1Config",
    "StateSpaceV2Config",
    "TokenSparseAttentionConfig",
    "UnifiedAttentionConfig",
]


@dataclasses.dataclass(frozen=True, kw_only=True)
class FlashAttentionConfig(TiledAttentionConfig):
    """Tiles of `flash_attention`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RingAttentionConfig(TiledAttentionConfig):
    """Tiles of `ring_attention`, of one device's part."""
