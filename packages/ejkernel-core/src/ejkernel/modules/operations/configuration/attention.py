"""Configurations of the dense attention operations; `configs` re-exports them."""

import dataclasses
from typing import ClassVar, Self

from ejkernel.ops.params import BaseOperationConfig, BwdParams, Direction, FwdParams, as_part


@dataclasses.dataclass(frozen=True)
class TiledAttentionConfig(BaseOperationConfig):
    """Tiles of both passes of a tiled softmax attention.

    Attributes:
        fwd_params: Forward tiles; `None` for the heuristics. A dictionary is converted.
        bwd_params: Backward tiles; as above.
    """

    part_types: ClassVar[dict[str, type]] = {"forward": FwdParams, "backward": BwdParams}

    fwd_params: FwdParams | None = None
    bwd_params: BwdParams | None = None

    def __post_init__(self) -> None:
        for name, kind in (("fwd_params", FwdParams), ("bwd_params", BwdParams)):
            object.__setattr__(self, name, as_part(name, getattr(self, name), kind))

    def part(self, direction: Direction) -> FwdParams | BwdParams | None:
        return self.fwd_params if direction == "forward" else self.bwd_params

    @classmethod
    def from_parts(cls, forward: FwdParams | None, backward: BwdParams | None) -> Self:
        return cls(fwd_params=forward, bwd_params=backward)


@dataclasses.dataclass(frozen=True)
class BlockSparseAttentionConfig(TiledAttentionConfig):
    """Tiles of `blocksparse_attention`."""


@dataclasses.dataclass(frozen=True)
class ScaledDotProductAttentionConfig(TiledAttentionConfig):
    """Tiles of `scaled_dot_product_attention`: for both passes at once, or for each.

    Attributes:
        block_q: Queries per tile, in each pass that has no parameters of its own; `None` for the heuristics.
        block_k: Keys per tile, as above.
        num_warps: Warps per program, as above.
        num_stages: Software pipeline depth, as above.
    """

    block_q: int | None = None
    block_k: int | None = None
    num_warps: int | None = None
    num_stages: int | None = None
    fwd_params: FwdParams | None = dataclasses.field(default=None, kw_only=True)
    bwd_params: BwdParams | None = dataclasses.field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._shared(FwdParams)  # raises for values that are no sizes

    def part(self, direction: Direction) -> FwdParams | BwdParams | None:
        kind = FwdParams if direction == "forward" else BwdParams
        return super().part(direction) or self._shared(kind)

    def _shared(self, params_type: type[FwdParams] | type[BwdParams]) -> FwdParams | BwdParams | None:
        shared = params_type(
            q_blocksize=self.block_q,
            kv_blocksize=self.block_k,
            num_warps=self.num_warps,
            num_stages=self.num_stages,
        )
        return None if shared == params_type() else shared


@dataclasses.dataclass(frozen=True)
class AttentionConfig(BaseOperationConfig):
    """Tiles of `attention`. `None` lets the heuristics decide.

    Attributes:
        block_q: Queries per tile of a call with `return_weights=False`.
        block_k: Keys per tile of such a call.
        weights_block_q: Queries per tile of a call with `return_weights=True`.
        weights_block_k: Keys per tile of such a call.
        num_warps: Warps per program.
        num_stages: Software pipeline depth.
    """

    block_q: int | None = None
    block_k: int | None = None
    weights_block_q: int | None = None
    weights_block_k: int | None = None
    num_warps: int | None = None
    num_stages: int | None = None
