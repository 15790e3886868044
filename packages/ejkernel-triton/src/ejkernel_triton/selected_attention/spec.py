"""What the selected-attention kernels are compiled for: all about a record that is neither an array nor a tile size."""

import dataclasses
import math

import jax.numpy as jnp

from ejkernel.families.selected_attention import SelectedAttention, blocks, slots
from ejkernel.ops.device import current_device
from ejkernel_triton.launch import interpreting
from ejkernel_triton.selected_attention.config import padded

LOG2E = math.log2(math.e)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SelectedSpec:
    """Constants of the kernels; the letters are those of the record.

    Attributes:
        T: Queries.
        S: Keys.
        H: Query heads.
        HK: KV heads.
        G: Query heads per KV head.
        BG: G, padded to what a matrix product takes.
        D: Head dimension of queries and keys.
        DV: Head dimension of values.
        BD: D, padded likewise.
        BV: DV, padded likewise.
        SLOTS: N, listed blocks a query.
        BS: N, padded to a power of two.
        M: Blocks.
        SIZE: Keys a block.
        STARTS: Whether blocks start where an array says, and not at multiples of SIZE.
        OWN: Whether an array has each query's own key, which is the one of its index otherwise.
        SEGMENTS: Whether there are segment ids.
        SCALE: Factor on the scores.
        FACTOR: The same, times log2(e).
        PRECISION: Of products of float32.
        WIDEN: Whether operands of products become float32 first: the interpreter multiplies the bits of bfloat16.
    """

    T: int
    S: int
    H: int
    HK: int
    G: int
    BG: int
    D: int
    DV: int
    BD: int
    BV: int
    SLOTS: int
    BS: int
    M: int
    SIZE: int
    STARTS: bool
    OWN: bool
    SEGMENTS: bool
    SCALE: float
    FACTOR: float
    PRECISION: str
    WIDEN: bool


def make_spec(record: SelectedAttention) -> SelectedSpec:
    """The constants of a record's kernels on the device in use."""
    (_, t, h, d), (_, s, hk, dv) = record.query.shape, record.value.shape
    count = slots(record)
    return SelectedSpec(
        T=t,
        S=s,
        H=h,
        HK=hk,
        G=h // hk,
        BG=padded(h // hk),
        D=d,
        DV=dv,
        BD=padded(d),
        BV=padded(dv),
        SLOTS=count,
        BS=1 << (count - 1).bit_length(),
        M=blocks(record),
        SIZE=record.block_size,
        STARTS=record.block_starts is not None,
        OWN=record.q_positions is not None,
        SEGMENTS=record.q_segment_ids is not None,
        SCALE=record.softmax_scale,
        FACTOR=record.softmax_scale * LOG2E,
        PRECISION="tf32x3" if current_device().vendor == "nvidia" else "ieee",
        WIDEN=interpreting() and record.query.dtype == jnp.bfloat16,
    )
