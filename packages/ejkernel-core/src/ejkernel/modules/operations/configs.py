"""One configuration class an operation: choices that change its speed and never its answer (beyond rounding)."""

import dataclasses
from typing import ClassVar, Self

import msgspec

from ejkernel.modules.operations.attention_configs import (
    AttentionConfig,
    BlockSparseAttentionConfig,
    ScaledDotProductAttentionConfig,
)
from ejkernel.modules.operations.latent_configs import (
    FlashMLAConfig,
    MLADecodeConfig,
    NativeSparseAttentionConfig,
)
from ejkernel.modules.operations.paged_configs import (
    ChunkedPrefillPagedDecodeConfig,
    DecodeAttentionConfig,
    PageAttentionConfig,
    PagedAttentionConfig,
    PrefillPageAttentionConfig,
    RaggedDecodeAttentionConfig,
    RaggedPageAttentionv2Config,
    RaggedPageAttentionv3Config,
    UnifiedAttentionConfig,
)
from ejkernel.modules.operations.recurrence_configs import (
    GatedDeltaRuleConfig,
    GLAttentionConfig,
    KernelDeltaAttentionConfig,
    LightningAttentionConfig,
    RaggedGatedDeltaRuleConfig,
    RecurrentAttentionConfig,
    StateSpaceV2Config,
)
from ejkernel.modules.operations.sequence_configs import (
    GroupedMatmulConfig,
    GRUConfig,
    LSTMConfig,
    MeanPoolingConfig,
    RNNConfig,
    StateSpaceV1Config,
)
from ejkernel.ops.config.params import BaseOperationConfig, BwdParams, Direction, FwdParams

__all__ = [
    "AttentionConfig",
    "BaseOperationConfig",
    "BlockSparseAttentionConfig",
    "BwdParams",
    "ChunkedPrefillPagedDecodeConfig",
    "DecodeAttentionConfig",
    "FlashAttentionConfig",
    "FlashMLAConfig",
    "FwdParams",
    "GLAttentionConfig",
    "GRUConfig",
    "GatedDeltaRuleConfig",
    "GroupedMatmulConfig",
    "KernelDeltaAttentionConfig",
    "LSTMConfig",
    "LightningAttentionConfig",
    "MLADecodeConfig",
    "MeanPoolingConfig",
    "NativeSparseAttentionConfig",
    "PageAttentionConfig",
    "PagedAttentionConfig",
    "PrefillPageAttentionConfig",
    "RNNConfig",
    "RaggedDecodeAttentionConfig",
    "RaggedGatedDeltaRuleConfig",
    "RaggedPageAttentionv2Config",
    "RaggedPageAttentionv3Config",
    "RecurrentAttentionConfig",
    "ScaledDotProductAttentionConfig",
    "StateSpaceV1Config",
    "StateSpaceV2Config",
    "UnifiedAttentionConfig",
]


@dataclasses.dataclass(frozen=True, kw_only=True)
class FlashAttentionConfig(BaseOperationConfig):
    """Tiles of `flash_attention`.

    Attributes:
        fwd_params: Forward tiles; `None` for the heuristics. A dictionary is converted.
        bwd_params: Backward tiles; likewise.
    """

    part_types: ClassVar[dict[str, type]] = {"forward": FwdParams, "backward": BwdParams}

    fwd_params: FwdParams | None = None
    bwd_params: BwdParams | None = None

    def __post_init__(self) -> None:
        for name, kind in (("fwd_params", FwdParams), ("bwd_params", BwdParams)):
            if isinstance(getattr(self, name), dict):
                object.__setattr__(self, name, msgspec.convert(getattr(self, name), kind))

    def part(self, direction: Direction) -> FwdParams | BwdParams | None:
        return self.fwd_params if direction == "forward" else self.bwd_params

    @classmethod
    def from_parts(cls, forward: FwdParams | None, backward: BwdParams | None) -> Self:
        return cls(fwd_params=forward, bwd_params=backward)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RingAttentionConfig(FlashAttentionConfig):
    """Tiles of `ring_attention`, of one device's part; fields as in `FlashAttentionConfig`."""
