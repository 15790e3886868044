"""Configurations of latent and of sparse attention; `configs` re-exports them."""

import dataclasses
from typing import ClassVar

from ejkernel.modules.operations.configuration.attention import ScaledDotProductAttentionConfig
from ejkernel.ops.params import BaseOperationConfig


@dataclasses.dataclass(frozen=True)
class FlashMLAConfig(ScaledDotProductAttentionConfig):
    """Tiles of `flash_mla`; fields as in `ScaledDotProductAttentionConfig`."""


@dataclasses.dataclass(frozen=True)
class MLADecodeConfig(ScaledDotProductAttentionConfig):
    """Tiles of `mla_decode`; fields as in `ScaledDotProductAttentionConfig`."""


@dataclasses.dataclass(frozen=True)
class NativeSparseAttentionConfig(BaseOperationConfig):
    """Tiles of `native_sparse_attention`. `None` lets the heuristics decide.

    Attributes:
        block_q: Queries per tile.
        block_k: Keys per tile.
        block_d: Channels per tile.
        num_warps: Warps per program.
        num_stages: Software pipeline depth.
        block_size: The argument of that name; a call whose argument says otherwise is refused.
    """

    call_argument_fields: ClassVar[frozenset[str]] = BaseOperationConfig.call_argument_fields | {"block_size"}

    block_q: int | None = None
    block_k: int | None = None
    block_d: int | None = None
    block_size: int | None = None
    num_warps: int | None = None
    num_stages: int | None = None


@dataclasses.dataclass(frozen=True)
class LightningIndexerConfig(BaseOperationConfig):
    """Tiles of `lightning_indexer`. `None` lets the heuristics decide.

    Attributes:
        block_q: Queries per tile.
        block_k: Keys per tile.
    """

    block_q: int | None = None
    block_k: int | None = None


@dataclasses.dataclass(frozen=True)
class TokenSparseAttentionConfig(BaseOperationConfig):
    """Tiles of `token_sparse_attention`. `None` lets the heuristics decide.

    Attributes:
        block_q: Queries per tile.
        block_k: Listed keys per tile.
        num_warps: Warps per program.
        num_stages: Software pipeline depth.
    """

    block_q: int | None = None
    block_k: int | None = None
    num_warps: int | None = None
    num_stages: int | None = None


@dataclasses.dataclass(frozen=True)
class DeepSeekAttentionConfig(BaseOperationConfig):
    """Tiles of `deepseek_attn`. `None` lets the heuristics decide.

    Attributes:
        index_topk: The argument of that name; a call whose argument says otherwise is refused.
        block_q: Queries per tile.
        block_k: Keys per tile.
        gemm_block: Entries per tile of the products with the weights.
        num_warps: Warps per program.
        num_stages: Software pipeline depth.
    """

    call_argument_fields: ClassVar[frozenset[str]] = BaseOperationConfig.call_argument_fields | {"index_topk"}

    index_topk: int | None = None
    block_q: int | None = None
    block_k: int | None = None
    gemm_block: int | None = None
    num_warps: int | None = None
    num_stages: int | None = None


@dataclasses.dataclass(frozen=True)
class LightningIndexerLossConfig(BaseOperationConfig):
    """Tiles of `lightning_indexer_loss`. `None` lets the heuristics decide.

    Attributes:
        block_q: Queries per tile.
    """

    block_q: int | None = None


@dataclasses.dataclass(frozen=True)
class LightningIndexerDenseLossConfig(BaseOperationConfig):
    """Tiles of `lightning_indexer_dense_loss`. `None` lets the heuristics decide.

    Attributes:
        block_q: Queries per tile.
        block_k: Keys per tile.
    """

    block_q: int | None = None
    block_k: int | None = None
