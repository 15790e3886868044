"""Configurations of the recurrences."""

import dataclasses
from typing import ClassVar

from ejkernel.ops.params import BaseOperationConfig


@dataclasses.dataclass(frozen=True)
class _BlockConfig(BaseOperationConfig):
    """Blocks of a recurrence. `None` lets the heuristics decide.

    Attributes:
        block_q: Tokens per chunk.
        block_k: Key channels per block.
        block_d: Value channels per block.
        num_warps: Warps per program.
        num_stages: Software pipeline depth.
    """

    block_q: int | None = None
    block_k: int | None = None
    block_d: int | None = None
    num_warps: int | None = None
    num_stages: int | None = None

    def __post_init__(self) -> None:
        _check_positive(self)


@dataclasses.dataclass(frozen=True)
class RecurrentAttentionConfig(_BlockConfig):
    """Blocks of `recurrent_attention`."""


@dataclasses.dataclass(frozen=True)
class GLAttentionConfig(_BlockConfig):
    """Blocks of `gated_linear_attention`."""


@dataclasses.dataclass(frozen=True)
class LightningAttentionConfig(_BlockConfig):
    """Blocks of `lightning_attention`."""


@dataclasses.dataclass(frozen=True)
class _ChunkConfig(BaseOperationConfig):
    """Chunks of a recurrence. `None` lets the heuristics decide.

    Attributes:
        chunk_size: Tokens per chunk.
    """

    chunk_size: int | None = None

    def __post_init__(self) -> None:
        _check_positive(self)


@dataclasses.dataclass(frozen=True)
class KernelDeltaAttentionConfig(_ChunkConfig):
    """Chunks of `kernel_delta_attention`."""


@dataclasses.dataclass(frozen=True)
class GatedDeltaRuleConfig(_ChunkConfig):
    """Chunks of `gated_delta_rule`."""


@dataclasses.dataclass(frozen=True)
class RaggedGatedDeltaRuleConfig(_ChunkConfig):
    """Chunks of `ragged_gated_delta_rule`."""


@dataclasses.dataclass(frozen=True)
class RWKV4Config(BaseOperationConfig):
    """The loop of `rwkv4`. `None` lets the heuristics decide.

    Attributes:
        block_c: Channels per block.
        unroll: Tokens per iteration of the loop.
    """

    block_c: int | None = None
    unroll: int | None = dataclasses.field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        _check_positive(self)


@dataclasses.dataclass(frozen=True)
class RWKV6Config(_ChunkConfig):
    """Chunks of `rwkv6`."""


@dataclasses.dataclass(frozen=True)
class RWKV7Config(BaseOperationConfig):
    """Chunks of `rwkv7`. `None` lets the heuristics decide.

    Attributes:
        block_v: Value channels per block.
        num_warps: Warps per program.
        num_stages: Software pipeline depth.
        chunk_size: Tokens per chunk.
    """

    block_v: int | None = None
    num_warps: int | None = None
    num_stages: int | None = None
    chunk_size: int | None = dataclasses.field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        _check_positive(self)


@dataclasses.dataclass(frozen=True)
class RWKV7MulConfig(RWKV7Config):
    """Chunks of `rwkv7_mul`. `None` lets the heuristics decide."""


@dataclasses.dataclass(frozen=True)
class StateSpaceV2Config(BaseOperationConfig):
    """Chunks of `state_space_v2`. `None` lets the heuristics decide.

    The first three fields repeat arguments: a call whose arguments say otherwise is refused.

    Attributes:
        n_groups: The groups of B.
        use_gated_rmsnorm: As the argument.
        rmsnorm_eps: As the argument.
        block_e: State channels per block.
        chunk_size: Tokens per chunk.
    """

    call_argument_fields: ClassVar[frozenset[str]] = BaseOperationConfig.call_argument_fields | {
        "n_groups",
        "use_gated_rmsnorm",
        "rmsnorm_eps",
    }

    n_groups: int | None = None
    use_gated_rmsnorm: bool | None = None
    rmsnorm_eps: float | None = None
    block_e: int | None = None
    chunk_size: int | None = dataclasses.field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        _check_positive(self)


def _check_positive(config: BaseOperationConfig) -> None:
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if isinstance(value, int) and not isinstance(value, bool) and value < 1:
            raise ValueError(f"{field.name}: got {value}, wants at least 1")
