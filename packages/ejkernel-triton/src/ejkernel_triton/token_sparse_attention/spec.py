"""The compile-time constants of the token-sparse attention kernels."""

import dataclasses
import math

import jax.numpy as jnp

from ejkernel.arithmetic import LOG2E
from ejkernel.families.token_sparse_attention import TokenSparseAttention
from ejkernel.ops.device import current_device
from ejkernel_triton.launch import is_interpreting
from ejkernel_triton.sizes import AttentionSizes, pad_to_dot_size, pad_to_power_of_two


@dataclasses.dataclass(frozen=True, kw_only=True)
class SparseSpec(AttentionSizes):
    """Constants of the kernels; the letters are those of the record.

    Attributes:
        BD: Columns of the first tile of a key, a power of two.
        BR: Columns of the second tile, a power of two; 0 where the first has all D columns.
        K: Listed keys per query.
        NUM_LISTS: Lists per query: one for all heads, or one for each KV head.
        VALUE_STRIDE: Elements between the values of two keys: HK DV, or HK D where a value is the start of its key.
        VALUE_IS_FIRST_TILE: Whether a value is the first tile of its key, which is then loaded once.
        HAS_SINKS: Whether there are sinks.
        LOG2_SCORE_FACTOR: Factor on the scores times log2(e), since the kernels exponentiate with exp2.
        SUM_FACTOR: Power of two next to the factor on the scores, on float32 sums of gradients: gradients of scores in
            float16 would lose small numbers if the whole factor was theirs.
        DSCORE_FACTOR: The rest of the factor on the scores, on their gradients.
        PRECISION: How Triton multiplies float32 tiles: "ieee" or "tf32x3".
        WIDEN_TO_FLOAT32: Whether operands are converted first: the interpreter multiplies the bits of bfloat16.
    """

    BR: int
    K: int
    NUM_LISTS: int
    VALUE_STRIDE: int
    VALUE_IS_FIRST_TILE: bool
    HAS_SINKS: bool
    LOG2_SCORE_FACTOR: float
    SUM_FACTOR: float
    DSCORE_FACTOR: float
    PRECISION: str
    WIDEN_TO_FLOAT32: bool


def make_spec(record: TokenSparseAttention) -> SparseSpec:
    """Returns the constants of a record's kernels on the device in use."""
    (_, t, h, d), (_, s, hk, _) = record.query.shape, record.key.shape
    first, second = key_tile_columns(d)
    sum_factor = 2.0 ** (math.frexp(record.softmax_scale)[1] - 1)  # 1/2 for a factor of 0
    return SparseSpec(
        T=t,
        S=s,
        H=h,
        HK=hk,
        G=h // hk,
        D=d,
        DV=record.value_size,
        BD=first,
        BR=second,
        BV=pad_to_dot_size(record.value_size),
        K=record.indices.shape[3],
        NUM_LISTS=record.indices.shape[2],
        VALUE_STRIDE=hk * (d if record.value is None else record.value_size),
        VALUE_IS_FIRST_TILE=value_is_first_tile(record),
        HAS_SINKS=record.softmax_aux is not None,
        LOG2_SCORE_FACTOR=record.softmax_scale * LOG2E,
        SUM_FACTOR=sum_factor,
        DSCORE_FACTOR=record.softmax_scale / sum_factor,
        PRECISION="tf32x3" if current_device().vendor == "nvidia" else "ieee",
        WIDEN_TO_FLOAT32=is_interpreting() and record.query.dtype == jnp.bfloat16,
    )


def key_tile_columns(head_dim: int) -> tuple[int, int]:
    """Returns the columns of the two tiles of a key: 512 and 64 of 576, where a single tile would have 1024."""
    whole = pad_to_dot_size(head_dim)
    first = pad_to_power_of_two(head_dim // 2 + 1, 16)
    second = pad_to_dot_size(head_dim - first) if head_dim > first else 0
    return (first, second) if second and first + second < whole else (whole, 0)


def value_is_first_tile(record: TokenSparseAttention) -> bool:
    """Returns whether a value is the first tile of its key."""
    return record.value is None and record.value_size == key_tile_columns(record.query.shape[3])[0]
