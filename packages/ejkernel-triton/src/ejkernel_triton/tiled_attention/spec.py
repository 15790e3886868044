"""The compile-time constants of the tiled-attention kernels."""

import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from ejkernel.arithmetic import LOG2E
from ejkernel.families.tiled_attention import TiledAttention, band
from ejkernel.ops.device import current_device
from ejkernel.planning import dropout
from ejkernel_triton.launch import interpreting
from ejkernel_triton.sizes import (
    padded_for_dot,
)

LOWEST_LOG2_SCORE = -3e38
"""The lowest score in base 2: scores that a bias sets to the lowest float must stay finite."""

Strides = tuple[int, int, int, int]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Spec:
    """Constants of a kernel; the letters are those of the record.

    Attributes:
        T: Queries.
        S: Keys.
        H: Query heads.
        HK: KV heads.
        G: Query heads per KV head.
        D: Head dimension of queries and keys.
        DV: Head dimension of values.
        BD: D, padded to a size that `tl.dot` supports.
        BV: DV, padded the same way.
        SCALE: Factor on the scores.
        PLAIN: Whether a score is a product times a positive factor, which is then part of `FACTOR`.
        FACTOR: Converts scores to base 2.
        BIASED: Whether scores may be as low as the lowest float, or -inf.
        LEFT: Band: `-LEFT <= k - q`; None is open.
        RIGHT: Band: `k - q <= RIGHT`; None is open.
        Q_POSITIONS: Whether there are query positions.
        K_POSITIONS: Whether there are key positions.
        SEGMENTS: Whether there are segment ids.
        BIAS: Strides of the bias over its rows, heads, queries and keys, 0 where it broadcasts; None without it.
        MASK: Strides of the mask, in the same form; None without it.
        PATTERN: Queries and keys of a tile mask of the pattern; None without one.
        CAP: Soft cap, or None.
        FAST_TANH: Whether the device has an approximate tanh, and it is precise enough.
        ROUND: "bfloat16" or "float16", the dtype that scores are rounded to; None for neither.
        DROPOUT: Whether weights are dropped: where the row's key times the column's is below THRESHOLD.
        THRESHOLD: Dropout probability times 2 ** 32.
        KEPT: Factor on the weights that are not dropped.
        NORMALIZE: Whether outputs are normalised.
        SINKS: Whether there are sinks.
        COLUMNS_PER_SLICE: Columns per product, for rows too long for registers; None for all.
        PRECISION: How Triton multiplies float32 tiles.
        WIDEN: Whether operands are converted to float32 first: the interpreter multiplies the bits of bfloat16.
    """

    T: int
    S: int
    H: int
    HK: int
    G: int
    D: int
    DV: int
    BD: int
    BV: int
    SCALE: float
    PLAIN: bool
    FACTOR: float
    BIASED: bool
    LEFT: int | None
    RIGHT: int | None
    Q_POSITIONS: bool
    K_POSITIONS: bool
    SEGMENTS: bool
    BIAS: Strides | None
    MASK: Strides | None
    PATTERN: tuple[int, int] | None
    CAP: float | None
    FAST_TANH: bool
    ROUND: str | None
    DROPOUT: bool
    THRESHOLD: int
    KEPT: float
    NORMALIZE: bool
    SINKS: bool
    COLUMNS_PER_SLICE: int | None
    PRECISION: str
    WIDEN: bool


class SharedMemoryCopies(NamedTuple):
    """How many copies shared memory holds of the rows that a program keeps, and of those of a stage that it streams."""

    stationary: int
    streamed: int


HALF_PRECISION_COPIES = {
    "forward": SharedMemoryCopies(1, 2),
    "keys": SharedMemoryCopies(2, 2),
    "queries": SharedMemoryCopies(2, 2),
}
FLOAT32_COPIES = {
    "forward": SharedMemoryCopies(2, 1),
    "keys": SharedMemoryCopies(4, 2),
    "queries": SharedMemoryCopies(4, 2),
}
"""For float32, whose split operands pass through shared memory."""
SLICED_ROW_COPIES = {
    "forward": SharedMemoryCopies(2, 1),
    "keys": SharedMemoryCopies(0, 1),
    "queries": SharedMemoryCopies(0, 1),
}
"""For float32 with rows that the backward kernels multiply in pieces."""


def make_spec(record: TiledAttention, q_block: int, kv_block: int, *, slice_rows: bool) -> Spec:
    """Returns the constants of a record's kernels on the device in use, for tiles of a size.

    Args:
        record: The record in the kernels' dtypes.
        q_block: Queries per tile.
        kv_block: Keys per tile.
        slice_rows: The result of `slices_rows` for the tiles.
    """
    (_, t, h, d), (_, s, hk, dv) = record.query.shape, record.value.shape
    left, right = band(record)
    rounding_dtype = record.logits_dtype if record.logits_dtype != jnp.float32 else None
    is_scaled_product = (
        record.bias is None and record.logits_soft_cap is None and rounding_dtype is None and record.softmax_scale > 0
    )
    vendor, is_half_precision = current_device().vendor, record.query.dtype != jnp.float32
    return Spec(
        T=t,
        S=s,
        H=h,
        HK=hk,
        G=h // hk,
        D=d,
        DV=dv,
        BD=padded_for_dot(d),
        BV=padded_for_dot(dv),
        SCALE=record.softmax_scale,
        PLAIN=is_scaled_product,
        FACTOR=record.softmax_scale * LOG2E if is_scaled_product else LOG2E,
        BIASED=record.bias is not None,
        LEFT=left,
        RIGHT=right,
        Q_POSITIONS=record.q_positions is not None,
        K_POSITIONS=record.kv_positions is not None,
        SEGMENTS=record.q_segment_ids is not None,
        BIAS=_broadcast_strides(record.bias),
        MASK=_broadcast_strides(record.mask),
        PATTERN=None if record.pattern is None else (q_block, kv_block),
        CAP=record.logits_soft_cap,
        FAST_TANH=vendor == "nvidia" and is_half_precision and not interpreting(),
        ROUND=None if rounding_dtype is None else jnp.dtype(rounding_dtype).name,
        DROPOUT=record.dropout_prob > 0.0,
        THRESHOLD=dropout.threshold(record.dropout_prob),
        KEPT=1.0 / (1.0 - record.dropout_prob),
        NORMALIZE=record.normalize_output,
        SINKS=record.softmax_aux is not None,
        COLUMNS_PER_SLICE=64 if slice_rows else None,
        PRECISION=_precision(record, vendor),
        WIDEN=interpreting() and record.query.dtype == jnp.bfloat16,
    )


def longest_padded_row(record: TiledAttention) -> int:
    """Returns the padded elements of the longest row, of queries or of values."""
    return max(padded_for_dot(record.query.shape[3]), padded_for_dot(record.value.shape[3]))


def splits_key_value_gradients(record: TiledAttention) -> bool:
    """Returns whether two kernels compute the gradients of keys and of values: rows are too long for the registers
    of one.
    """
    return longest_padded_row(record) > 128


def slices_rows(record: TiledAttention, stationary: int, streamed: int) -> bool:
    """Returns whether the kernels multiply rows piece by piece: float32 rows that are too long for registers.

    Then the warps of a program share the rows that it streams, which are more than it keeps. Tiles that keep more rows
    hold them whole: on an H200 those are faster with head dimension 128, although registers spill.
    """
    return record.query.dtype == jnp.float32 and longest_padded_row(record) > 64 and streamed > stationary


def _precision(record: TiledAttention, vendor: str) -> str:
    """Returns the precision of float32 products: three on tensor cores keep all digits; HIGHEST avoids tensor cores."""
    return "tf32x3" if vendor == "nvidia" and record.precision != lax.Precision.HIGHEST else "ieee"


def _broadcast_strides(pairs: Any) -> Strides | None:
    """Returns the strides of an array [B|1, H|1, T|1, S|1], with 0 for the heads, queries and keys that broadcast."""
    if pairs is None:
        return None
    _, h, t, s = pairs.shape
    return h * t * s, t * s if h > 1 else 0, s if t > 1 else 0, 1 if s > 1 else 0


def shared_row_bytes(record: TiledAttention, pass_name: str, tile: Any) -> int:
    """Returns the bytes of the rows of a `Tile` in a pass: "forward", "keys" or "queries"."""
    itemsize = jnp.dtype(record.query.dtype).itemsize
    slice_rows = slices_rows(record, tile.stationary, tile.streamed)
    copies = (SLICED_ROW_COPIES if slice_rows else FLOAT32_COPIES if itemsize > 2 else HALF_PRECISION_COPIES)[pass_name]
    rows = copies.stationary * tile.stationary + copies.streamed * tile.stages * tile.streamed
    return rows * itemsize * longest_padded_row(record)


def shared_pair_bytes(record: TiledAttention, tile: Any) -> int:
    """Returns the bytes of pairwise operands: tiles of a bias are prefetched as those of keys are, a mask's are not."""
    bytes_per_pair = 0 if record.bias is None else (tile.stages - 1) * record.bias.dtype.itemsize
    return (bytes_per_pair + (record.mask is not None)) * tile.stationary * tile.streamed
