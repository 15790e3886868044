"""The compile-time constants of a tiled-attention kernel: everything about a record except arrays and traced
numbers.

Layout of scores: if a kernel accumulates for queries, queries are along sublanes and keys along lanes; if it
accumulates for keys (`by_key`), the other way around. So no kernel transposes weights, and an accumulator has the shape
of its tile.
"""

import dataclasses
import math
from typing import NamedTuple

from jax import lax

from ejkernel.arithmetic import LOG2E, cdiv
from ejkernel.families.tiled_attention import TiledAttention, band
from ejkernel.ops.device import current_device
from ejkernel.planning import dropout
from ejkernel.planning.precision import product_precision
from ejkernel_pallas.tpu.generations import has_256_wide_mxu
from ejkernel_pallas.tpu.mosaic.vectors import LANES

MASKED_SCORE = -3e38
"""The smallest score as a power of two: a bias of the smallest finite float32 must stay finite when multiplied by
log2(e).
"""


class Blocks(NamedTuple):
    """Numbers of queries and keys per tile, and of queries and keys per product; multiples of 128."""

    queries: int
    keys: int
    chunk_q: int
    chunk_kv: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class TiledSpec:
    """The compile-time constants of a kernel.

    Attributes:
        queries: T.
        keys: S.
        heads: Query heads.
        group_size: Query heads per KV head.
        head_dim: D.
        value_dim: Dv.
        block_q: Queries per tile; a multiple of 128.
        block_kv: Keys per tile; a multiple of 128.
        chunk_q: Queries per product; a tile has several products that overlap; divides `block_q`.
        chunk_kv: Keys per product; divides `block_kv`.
        by_key: Whether the kernel accumulates for a key block, and has keys along sublanes.
        scale: Factor on the scores (`softmax_scale`).
        scale_only: Whether a score is just a product times a scale; the scale is then a part of `log2_scale`.
        log2_scale: Factor on a score that turns its exponential into a power of two.
        biased: Whether a bias may make scores as small as the smallest float32, or -inf.
        left: Band: `-left <= k - q`; None is open.
        right: Band: `k - q <= right`; None is open.
        soft_cap: Soft cap, or None.
        threshold: Dropout drops a pair whose hash is below it; None without dropout.
        dropout_scale: Factor 1 / (1 - p) on the weights that dropout keeps.
        precision: Precision of the matrix products.
        trapezoid: Whether chunks on the causal diagonal are cut along it, for square tiles without any other mask.
        restricted: Whether band, segments, mask or pattern may mask pairs.
        sums_on_mxu: Whether the MXU sums the weights of a row, in output columns that a product with values leaves
            idle.
    """

    queries: int
    keys: int
    heads: int
    group_size: int
    head_dim: int
    value_dim: int
    block_q: int
    block_kv: int
    chunk_q: int
    chunk_kv: int
    by_key: bool
    scale: float
    scale_only: bool
    log2_scale: float
    biased: bool
    left: int | None
    right: int | None
    soft_cap: float | None
    threshold: int | None
    dropout_scale: float
    precision: lax.Precision | None
    trapezoid: bool
    restricted: bool
    sums_on_mxu: bool

    @property
    def by_columns(self) -> bool:
        """Returns whether diagonal tiles are cut into chunks of few keys, each with all queries from the diagonal
        on.
        """
        return self.chunk_kv <= 256

    @property
    def masks(self) -> bool:
        """Returns whether some tile pair may have masked pairs."""
        return self.restricted or self.ragged_queries or self.ragged_keys

    @property
    def ragged_queries(self) -> bool:
        """Returns whether the last tile of queries extends beyond the last query."""
        return self.queries % self.block_q != 0

    @property
    def ragged_keys(self) -> bool:
        """Returns whether the last tile of keys extends beyond the last key."""
        return self.keys % self.block_kv != 0


def make_spec(record: TiledAttention, blocks: Blocks, by_key: bool = False) -> TiledSpec:
    """Returns the constants of a record's kernels with given tiles."""
    (_, queries, heads, size), (_, keys, kv_heads, value_size) = record.query.shape, record.value.shape
    block_q, block_kv = _fit_block(queries, blocks.queries), _fit_block(keys, blocks.keys)
    left, right = band(record)
    scale_only = record.bias is None and record.logits_soft_cap is None
    indexed = record.q_positions is None and record.kv_positions is None and record.q_segment_ids is None
    restrictions = (record.q_segment_ids, record.mask, record.pattern)
    whole = block_q == block_kv and queries % block_q == 0 and keys % block_kv == 0
    return TiledSpec(
        queries=queries,
        keys=keys,
        heads=heads,
        group_size=heads // kv_heads,
        head_dim=size,
        value_dim=value_size,
        block_q=block_q,
        block_kv=block_kv,
        chunk_q=math.gcd(block_q, blocks.chunk_q),
        chunk_kv=math.gcd(block_kv, blocks.chunk_kv),
        by_key=by_key,
        scale=record.softmax_scale,
        scale_only=scale_only,
        log2_scale=record.softmax_scale * LOG2E if scale_only else LOG2E,
        biased=record.bias is not None,
        left=left,
        right=right,
        soft_cap=record.logits_soft_cap,
        threshold=dropout.dropout_threshold(record.dropout_prob) if record.dropout_prob > 0.0 else None,
        dropout_scale=1.0 / (1.0 - record.dropout_prob),
        precision=_precision(record),
        trapezoid=indexed and left is None and right == 0 and record.mask is None and record.pattern is None and whole,
        restricted=(left, right) != (None, None) or not all(x is None for x in restrictions),
        sums_on_mxu=_sums_on_mxu(record),
    )


def _sums_on_mxu(record: TiledAttention) -> bool:
    small = record.value.shape[3] <= LANES and record.value.dtype.itemsize == 2
    return small and has_256_wide_mxu(current_device().kind) and record.dropout_prob == 0.0


def pad_head_dim(size: int) -> int:
    """Returns the head dimension padded to whole lanes, which it takes in VMEM anyway."""
    return cdiv(size, LANES) * LANES


def _fit_block(length: int, block: int) -> int:
    """Returns the block size, no larger than needed to cover the length."""
    if block < 1 or block % LANES:
        raise ValueError(f"tile of {block}: wants a multiple of {LANES}")
    return min(block, pad_head_dim(length))


def _precision(record: TiledAttention) -> lax.Precision | None:
    """Returns the nearest precision that Mosaic has: one bfloat16 pass or six; three passes become six."""
    requested_precision = product_precision(record.query.dtype, record.precision)
    return lax.Precision.HIGHEST if requested_precision == lax.Precision.HIGH else requested_precision
