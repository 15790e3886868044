"""The compile-time constants of the selected-attention kernels."""

import dataclasses

import jax.numpy as jnp

from ejkernel.arithmetic import LOG2E
from ejkernel.families.selected_attention import SelectedAttention, blocks_per_query, num_listable_blocks
from ejkernel.ops.device import current_device
from ejkernel_triton.launch import is_interpreting
from ejkernel_triton.sizes import AttentionSizes, pad_to_dot_size


@dataclasses.dataclass(frozen=True, kw_only=True)
class SelectedSpec(AttentionSizes):
    """Constants of the kernels; the letters are those of the record.

    Attributes:
        BG: G, padded to a power of two that `tl.dot` takes, at least 16.
        NUM_LISTED_BLOCKS: N, listed blocks per query.
        BS: N, padded to a power of two.
        M: Blocks.
        BLOCK_SIZE: Keys per block.
        HAS_BLOCK_STARTS: Whether an array has the blocks' starts; otherwise they are multiples of BLOCK_SIZE.
        HAS_POSITIONS: Whether an array has each query's position among the keys; otherwise it is the query's index.
        HAS_SEGMENTS: Whether there are segment ids.
        SCORE_SCALE: Factor on the scores.
        LOG2_SCORE_FACTOR: SCORE_SCALE times log2(e), since the kernels exponentiate with exp2.
        PRECISION: How Triton multiplies float32 tiles: "ieee" or "tf32x3".
        WIDEN_TO_FLOAT32: Whether operands are converted first: the interpreter multiplies the bits of bfloat16.
    """

    BG: int
    NUM_LISTED_BLOCKS: int
    BS: int
    M: int
    BLOCK_SIZE: int
    HAS_BLOCK_STARTS: bool
    HAS_POSITIONS: bool
    HAS_SEGMENTS: bool
    SCORE_SCALE: float
    LOG2_SCORE_FACTOR: float
    PRECISION: str
    WIDEN_TO_FLOAT32: bool


def make_spec(record: SelectedAttention) -> SelectedSpec:
    """Returns the constants of a record's kernels on the device in use."""
    (_, t, h, d), (_, s, hk, dv) = record.query.shape, record.value.shape
    count = blocks_per_query(record)
    return SelectedSpec(
        T=t,
        S=s,
        H=h,
        HK=hk,
        G=h // hk,
        BG=pad_to_dot_size(h // hk),
        D=d,
        DV=dv,
        BD=pad_to_dot_size(d),
        BV=pad_to_dot_size(dv),
        NUM_LISTED_BLOCKS=count,
        BS=1 << (count - 1).bit_length(),
        M=num_listable_blocks(record),
        BLOCK_SIZE=record.block_size,
        HAS_BLOCK_STARTS=record.block_starts is not None,
        HAS_POSITIONS=record.q_positions is not None,
        HAS_SEGMENTS=record.q_segment_ids is not None,
        SCORE_SCALE=record.softmax_scale,
        LOG2_SCORE_FACTOR=record.softmax_scale * LOG2E,
        PRECISION="tf32x3" if current_device().vendor == "nvidia" else "ieee",
        WIDEN_TO_FLOAT32=is_interpreting() and record.query.dtype == jnp.bfloat16,
    )
