"""Configurations of the operations over paged caches; `configs` re-exports them."""

import dataclasses
from typing import ClassVar, Literal, Self

from ejkernel.ops.params import BaseOperationConfig, Direction, FwdParams, as_part


@dataclasses.dataclass(frozen=True)
class PagedAttentionConfig(BaseOperationConfig):
    """The configuration fields that the operations over paged caches share. `None` lets the heuristics decide.

    Attributes:
        q_blocksize: Query rows of one sequence per tile.
        kv_blocksize: Keys per tile.
        seq_blocksize: Tiles worked on at once.
    """

    q_blocksize: int | None = dataclasses.field(default=None, kw_only=True)
    kv_blocksize: int | None = dataclasses.field(default=None, kw_only=True)
    seq_blocksize: int | None = dataclasses.field(default=None, kw_only=True)


@dataclasses.dataclass(frozen=True)
class PageAttentionConfig(PagedAttentionConfig):
    """Tiles of `page_attention`.

    Attributes:
        num_splits: Independent partial softmaxes over the keys of a sequence; 0 is `None`.
        pages_per_compute_block: Pages per tile, for kernels that read whole pages.
        num_warps: Warps per program.
        num_stages: Software pipeline depth.
        megacore_mode: What is split over the two cores of a TPU.
        inline_seq_dim: Whether a TPU kernel loops over the sequences itself or leaves them to its grid.
    """

    num_splits: int | None = None
    pages_per_compute_block: int | None = None
    num_warps: int | None = None
    num_stages: int | None = None
    megacore_mode: Literal["batch", "kv_head"] | None = dataclasses.field(default=None, kw_only=True)
    inline_seq_dim: bool | None = dataclasses.field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        if self.num_splits == 0:
            object.__setattr__(self, "num_splits", None)


@dataclasses.dataclass(frozen=True)
class PrefillPageAttentionConfig(PagedAttentionConfig):
    """Tiles of `prefill_page_attention`.

    Attributes:
        block_k: Keys per tile, for kernels that read whole pages.
        num_warps: Warps per program.
        num_stages: Software pipeline depth.
    """

    block_k: int | None = None
    num_warps: int | None = None
    num_stages: int | None = None


@dataclasses.dataclass(frozen=True)
class UnifiedAttentionConfig(PagedAttentionConfig):
    """Tiles of `unified_attention`.

    Attributes:
        seq_threshold_3d: From how many sequences on the keys of a sequence are not split over programs.
        num_par_softmax_segments: Independent partial softmaxes over the keys of a sequence.
        block_dim: Threads per block.
        num_warps: Warps per program.
        num_stages: Software pipeline depth.
    """

    seq_threshold_3d: int | None = None
    num_par_softmax_segments: int | None = None
    block_dim: int | None = None
    num_warps: int | None = None
    num_stages: int | None = None


@dataclasses.dataclass(frozen=True)
class ChunkedPrefillPagedDecodeConfig(PagedAttentionConfig):
    """Tiles of `chunked_prefill_paged_decode`; fields as in `UnifiedAttentionConfig`."""

    seq_threshold_3d: int | None = None
    num_par_softmax_segments: int | None = None
    num_warps: int | None = None
    num_stages: int | None = None


@dataclasses.dataclass(frozen=True)
class DecodeAttentionConfig(PagedAttentionConfig):
    """Tiles of `decode_attention`.

    Attributes:
        num_kv_splits: Independent partial softmaxes over the keys of a sequence.
        num_warps: Warps per program.
        num_stages: Software pipeline depth.
    """

    num_kv_splits: int | None = None
    num_warps: int | None = None
    num_stages: int | None = None


@dataclasses.dataclass(frozen=True)
class RaggedPageAttentionv2Config(PagedAttentionConfig):
    """Tiles of `ragged_page_attention_v2`.

    Attributes:
        num_kv_pages_per_block: Pages per tile, for kernels that read whole pages.
        num_queries_per_block: Query rows per tile, for kernels whose tiles span sequences.
        num_warps: Warps per program.
        num_stages: Software pipeline depth.
        vmem_limit_bytes: Memory of a TPU core that a kernel may use.
    """

    num_kv_pages_per_block: int | None = None
    num_queries_per_block: int | None = None
    num_warps: int | None = None
    num_stages: int | None = None
    vmem_limit_bytes: int | None = dataclasses.field(default=None, kw_only=True)


@dataclasses.dataclass(frozen=True)
class RaggedPageAttentionv3Config(PagedAttentionConfig):
    """Tiles of `ragged_page_attention_v3`.

    Attributes:
        chunk_prefill_size: Query rows of a sequence in the uniform prefill part of `distribution`.
        num_kv_pages_per_block: Pages per tile, for kernels that read whole pages.
        num_queries_per_block: Query rows per tile, for kernels whose tiles span sequences.
        num_warps: Warps per program.
        num_stages: Software pipeline depth.
        vmem_limit_bytes: Memory of a TPU core that a kernel may use.
    """

    chunk_prefill_size: int | None = None
    num_kv_pages_per_block: int | None = None
    num_queries_per_block: int | None = None
    num_warps: int | None = None
    num_stages: int | None = None
    vmem_limit_bytes: int | None = dataclasses.field(default=None, kw_only=True)


@dataclasses.dataclass(frozen=True)
class RaggedPageAttentionv2TurboQuantConfig(RaggedPageAttentionv2Config):
    """Tiles of `ragged_page_attention_v2_turboquant`; fields as in `RaggedPageAttentionv2Config`."""


@dataclasses.dataclass(frozen=True)
class RaggedPageAttentionv3TurboQuantConfig(RaggedPageAttentionv3Config):
    """Tiles of `ragged_page_attention_v3_turboquant`; fields as in `RaggedPageAttentionv3Config`."""


@dataclasses.dataclass(frozen=True)
class MultiLatentRaggedPageAttentionConfig(PagedAttentionConfig):
    """Tiles of `multi_latent_ragged_page_attention`; fields as in `RaggedPageAttentionv3Config`."""

    chunk_prefill_size: int | None = None
    num_kv_pages_per_block: int | None = None
    num_queries_per_block: int | None = None
    vmem_limit_bytes: int | None = None
    num_warps: int | None = None
    num_stages: int | None = None


@dataclasses.dataclass(frozen=True)
class MultiLatentRaggedPageAttentionV2Config(PagedAttentionConfig):
    """Tiles of `multi_latent_ragged_page_attention_v2`; fields as in `RaggedPageAttentionv3Config`.

    Attributes:
        num_kv_pages_per_block: Pages per tile; or one number for each part of `distribution`: decoding, uniform prefill
            and the rest.
        num_queries_per_block: Query rows per tile; or one number for each part.
    """

    chunk_prefill_size: int | None = None
    num_kv_pages_per_block: int | tuple[int, int, int] | None = None
    num_queries_per_block: int | tuple[int, int, int] | None = None
    vmem_limit_bytes: int | None = None
    num_warps: int | None = None
    num_stages: int | None = None


@dataclasses.dataclass(frozen=True)
class RaggedDecodeAttentionConfig(BaseOperationConfig):
    """Tiles of `ragged_decode_attention`.

    Attributes:
        fwd_params: Forward tiles; `None` for the heuristics. A dictionary is converted.
    """

    part_types: ClassVar[dict[str, type]] = {"forward": FwdParams}

    fwd_params: FwdParams | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "fwd_params", as_part("fwd_params", self.fwd_params, FwdParams))

    def part(self, direction: Direction) -> FwdParams | None:
        return self.fwd_params if direction == "forward" else None

    @classmethod
    def from_parts(cls, forward: FwdParams | None, backward: None) -> Self:
        return cls(fwd_params=forward)
