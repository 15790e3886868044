"""Configurations of pooling, gathers, grouped matmul, the selective scan and recurrent networks.

`configs` re-exports them.
"""

import dataclasses
from typing import ClassVar

from ejkernel.ops.params import BaseOperationConfig


@dataclasses.dataclass(frozen=True)
class _SequenceConfig(BaseOperationConfig):
    """Sizes that are positive, or left to the heuristics."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, int) and not isinstance(value, bool) and value < 1:
                raise ValueError(f"{field.name}: got {value}, wants at least 1")


@dataclasses.dataclass(frozen=True)
class MeanPoolingConfig(_SequenceConfig):
    """Tiles of `mean_pooling`. `None` lets the heuristics decide.

    Attributes:
        block_size: Tokens per tile.
        block_dim: Channels per tile.
        num_warps: Warps per program.
        num_stages: Software pipeline depth.
    """

    block_size: int | None = None
    block_dim: int | None = None
    num_warps: int | None = None
    num_stages: int | None = None


@dataclasses.dataclass(frozen=True)
class GroupedMatmulConfig(_SequenceConfig):
    """Tiles of `grouped_matmul`. `None` lets the heuristics decide.

    Attributes:
        block_m: Rows per tile.
        block_n: Columns per tile.
        block_k: Contracted elements per step.
        num_warps: Warps per program.
        num_stages: Software pipeline depth.
        bypass_xla_tiling: Changes nothing: rows are never padded, and XLA gets no hint about tiles.
    """

    call_argument_fields: ClassVar[frozenset[str]] = BaseOperationConfig.call_argument_fields | {"bypass_xla_tiling"}

    block_m: int | None = None
    block_n: int | None = None
    block_k: int | None = None
    num_warps: int | None = None
    num_stages: int | None = None
    bypass_xla_tiling: bool = False


@dataclasses.dataclass(frozen=True)
class QuantizedMatmulConfig(_SequenceConfig):
    """Tiles of `quantized_matmul`. `None` lets the heuristics decide.

    Attributes:
        block_m: Rows per tile.
        block_n: Columns of the output per tile.
        block_k: Contracted elements per step.
        num_warps: Warps per program.
        num_stages: Software pipeline depth.
        use_bf16: Whether products may be bfloat16.
        split_k: As `splits`.
        tpu_path: As the argument.
        block_r: Rows of packed weights per tile.
        block_w: Words of packed weights per tile.
        splits: Independent sums over the contracted elements, which are added up at the end.
        gemv_mode: As the argument, and so are the fields after it.
    """

    block_m: int | None = None
    block_n: int | None = None
    block_k: int | None = None
    num_warps: int | None = None
    num_stages: int | None = None
    use_bf16: bool | None = None
    split_k: int | None = None
    tpu_path: str | None = None
    block_r: int | None = dataclasses.field(default=None, kw_only=True)
    block_w: int | None = dataclasses.field(default=None, kw_only=True)
    splits: int | None = dataclasses.field(default=None, kw_only=True)
    gemv_mode: str | None = dataclasses.field(default=None, kw_only=True)
    revsplit_k: str | None = dataclasses.field(default=None, kw_only=True)
    revsplit_k_parts: int | None = dataclasses.field(default=None, kw_only=True)
    fuse: bool | None = dataclasses.field(default=None, kw_only=True)
    strict_fuse: bool | None = dataclasses.field(default=None, kw_only=True)
    allow_dense_fallback: bool | None = dataclasses.field(default=None, kw_only=True)


@dataclasses.dataclass(frozen=True)
class AllGatherMatmulConfig(_SequenceConfig):
    """Tiles and schedule of `all_gather_matmul`. `None` lets the heuristics decide.

    Attributes:
        block_n: Columns per tile.
        block_k: Contracted elements per step.
        num_warps: No kernel reads it.
        num_stages: No kernel reads it.
        block_m: Rows per tile.
        overlap: Whether transfers go around a ring under the products of its steps; False for one collective of XLA.
    """

    block_n: int | None = None
    block_k: int | None = None
    num_warps: int | None = None
    num_stages: int | None = None
    block_m: int | None = dataclasses.field(default=None, kw_only=True)
    overlap: bool | None = dataclasses.field(default=None, kw_only=True)


@dataclasses.dataclass(frozen=True)
class ReduceScatterMatmulConfig(_SequenceConfig):
    """Tiles and schedule of `reduce_scatter_matmul`; fields as in `AllGatherMatmulConfig`."""

    block_m: int | None = None
    block_n: int | None = None
    block_k: int | None = None
    num_warps: int | None = None
    num_stages: int | None = None
    overlap: bool | None = dataclasses.field(default=None, kw_only=True)


@dataclasses.dataclass(frozen=True)
class GatherReduceConfig(_SequenceConfig):
    """Tiles of `gather_reduce`. `None` lets the heuristics decide.

    Attributes:
        block_t: Tokens per tile; backward, rows.
        block_d: Channels per tile.
        num_warps: Warps per program.
    """

    block_t: int | None = None
    block_d: int | None = None
    num_warps: int | None = None


@dataclasses.dataclass(frozen=True)
class GatedGroupedMatmulConfig(_SequenceConfig):
    """Tiles of `gated_grouped_matmul`. `None` lets the heuristics decide.

    Attributes:
        block_m: Rows per tile.
        block_n: Columns of the output a tile.
        block_k: Contracted elements per step.
        num_warps: Warps per program.
        num_stages: Pipeline stages.
    """

    block_m: int | None = None
    block_n: int | None = None
    block_k: int | None = None
    num_warps: int | None = None
    num_stages: int | None = None


@dataclasses.dataclass(frozen=True)
class ExpertRoutingConfig(_SequenceConfig):
    """Tiles of `expert_routing`. `None` lets the heuristics decide.

    Attributes:
        block_t: Tokens per block.
        num_warps: Warps per program.
    """

    block_t: int | None = None
    num_warps: int | None = None


@dataclasses.dataclass(frozen=True)
class FusedCrossEntropyConfig(_SequenceConfig):
    """Blocks of `fused_cross_entropy`. `None` lets the heuristics decide.

    Attributes:
        block_v: Entries of the vocabulary per block of logits, in XLA and on TPUs.
        block_m: Tokens per block.
        num_warps: Warps per program.
        num_stages: No kernel reads it.
        checkpoint: No kernel reads it.
        sparse_skip: No kernel reads it.
    """

    block_v: int | None = None
    block_m: int | None = None
    num_warps: int | None = None
    num_stages: int | None = None
    checkpoint: bool | None = dataclasses.field(default=None, kw_only=True)
    sparse_skip: bool | None = dataclasses.field(default=None, kw_only=True)


@dataclasses.dataclass(frozen=True)
class FusedKLDivergenceConfig(_SequenceConfig):
    """Launch parameters of `fused_kl_divergence`. XLA chooses its blocks itself. `None` lets the heuristics decide.

    Attributes:
        block_v: No kernel reads it.
        block_m: No kernel reads it.
        num_warps: Warps per program.
        num_stages: No kernel reads it.
    """

    block_v: int | None = None
    block_m: int | None = None
    num_warps: int | None = None
    num_stages: int | None = None


@dataclasses.dataclass(frozen=True)
class CausalConv1dConfig(_SequenceConfig):
    """Blocks of `causal_conv1d`. `None` lets the heuristics decide.

    Attributes:
        block_t: Tokens per block.
        block_c: Channels per block.
    """

    block_t: int | None = None
    block_c: int | None = None


@dataclasses.dataclass(frozen=True)
class StateSpaceV1Config(_SequenceConfig):
    """Blocks of `state_space_v1`. `None` lets the heuristics decide.

    Attributes:
        block_d: Channels per block.
        block_e: Numbers of a state per block.
        associative: Whether the tokens of a chunk are combined as a tree: more work in fewer steps.
    """

    block_d: int | None = None
    block_e: int | None = None
    associative: bool | None = None


@dataclasses.dataclass(frozen=True)
class _NetworkConfig(_SequenceConfig):
    """How a recurrent network is run. `None` lets the heuristics decide.

    Attributes:
        block_t: Tokens whose inputs are multiplied at once.
        unroll: Tokens a turn of the loop.
    """

    block_t: int | None = None
    unroll: int | None = None


@dataclasses.dataclass(frozen=True)
class RNNConfig(_NetworkConfig):
    """How `rnn` is run."""


@dataclasses.dataclass(frozen=True)
class GRUConfig(_NetworkConfig):
    """How `gru` is run."""


@dataclasses.dataclass(frozen=True)
class LSTMConfig(_NetworkConfig):
    """How `lstm` is run."""
