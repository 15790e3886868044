"""Configurations of the recurrences."""

import dataclasses

from ejkernel.ops.config.params import BaseOperationConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class _BlockConfig(BaseOperationConfig):
    """Blocks of a recurrence. `None` lets the heuristics decide.

    Attributes:
        block_q: Tokens a chunk.
        block_k: Key channels a block.
        block_d: Value channels a block.
        num_warps: Warps a program.
        num_stages: Software pipeline depth.
    """

    block_q: int | None = None
    block_k: int | None = None
    block_d: int | None = None
    num_warps: int | None = None
    num_stages: int | None = None

    def __post_init__(self) -> None:
        _check_positive(self)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RecurrentAttentionConfig(_BlockConfig):
    """Blocks of `recurrent_attention`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class GLAttentionConfig(_BlockConfig):
    """Blocks of `gated_linear_attention`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LightningAttentionConfig(_BlockConfig):
    """Blocks of `lightning_attention`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class _ChunkConfig(BaseOperationConfig):
    """Chunks of a recurrence. `None` lets the heuristics decide.

    Attributes:
        chunk_size: Tokens a chunk.
    """

    chunk_size: int | None = None

    def __post_init__(self) -> None:
        _check_positive(self)


@dataclasses.dataclass(frozen=True, kw_only=True)
class KernelDeltaAttentionConfig(_ChunkConfig):
    """Chunks of `kernel_delta_attention`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class GatedDeltaRuleConfig(_ChunkConfig):
    """Chunks of `gated_delta_rule`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RaggedGatedDeltaRuleConfig(_ChunkConfig):
    """Chunks of `ragged_gated_delta_rule`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class StateSpaceV2Config(_ChunkConfig):
    """Chunks of `state_space_v2`.

    Attributes:
        block_e: State channels a block.
    """

    block_e: int | None = None


def _check_positive(config: BaseOperationConfig) -> None:
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if isinstance(value, int) and value < 1:
            raise ValueError(f"{field.name}: got {value}, wants at least 1")
