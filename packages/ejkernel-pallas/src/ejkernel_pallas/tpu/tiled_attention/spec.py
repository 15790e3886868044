"""What a tiled-attention kernel is compiled for: all about a record that is neither an array nor a traced number.

Queries of the scores are in sublanes and keys in lanes where products with keys or values are summed up for queries;
where they are summed up for keys it is the other way around. So no kernel transposes weights, and its accumulators are
as large as what it owns.
"""

import dataclasses
import math
from typing import NamedTuple

from jax import lax

from ejkernel.families.tiled_attention import TiledAttention, band
from ejkernel.ops.device import current_device
from ejkernel.planning import dropout
from ejkernel.planning.precision import product_precision
from ejkernel_pallas.tpu.generations import is_wide
from ejkernel_pallas.tpu.mosaic.vectors import LANES

LOG2E = math.log2(math.e)
LOWEST = -3e38
"""The least score as a power of two: what a bias hides by the least number there is must stay finite."""


class Blocks(NamedTuple):
    """Queries and keys a tile, and queries and keys a product; multiples of 128."""

    queries: int
    keys: int
    q_chunk: int
    kv_chunk: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Spec:
    """Constants of a kernel.

    Attributes:
        queries: T.
        keys: S.
        heads: Query heads.
        group: Query heads a KV head.
        size: D.
        value_size: Dv.
        q_block: Queries a tile; a multiple of 128.
        kv_block: Keys a tile; a multiple of 128.
        q_chunk: Queries of one product, of which a tile has several that overlap; divides `q_block`.
        kv_chunk: Keys of one product; divides `kv_block`.
        by_key: Whether the kernel owns key tiles, and has keys in sublanes.
        scale: Factor on the scores.
        plain: Whether a score is nothing but a product and a factor, which then is a part of `factor`.
        factor: What makes a score a power of two.
        biased: Whether scores may be as low as numbers are, or lower.
        left: Band: `-left <= k - q`; None is open.
        right: Band: `k - q <= right`; None is open.
        cap: Soft cap, or None.
        threshold: Dropout drops where a row's number times a column's is below; None without dropout.
        kept: What kept weights are multiplied with.
        precision: Of the matrix products.
        trapezoid: Whether tiles on the diagonal are cut along it: where only causal masks, in whole square tiles.
        restricted: Whether band, segments, mask or pattern may leave out pairs.
        counted: Whether weights are added up by the matrix unit, in outputs that a product with values leaves idle.
    """

    queries: int
    keys: int
    heads: int
    group: int
    size: int
    value_size: int
    q_block: int
    kv_block: int
    q_chunk: int
    kv_chunk: int
    by_key: bool
    scale: float
    plain: bool
    factor: float
    biased: bool
    left: int | None
    right: int | None
    cap: float | None
    threshold: int | None
    kept: float
    precision: lax.Precision | None
    trapezoid: bool
    restricted: bool
    counted: bool

    @property
    def by_columns(self) -> bool:
        """Whether tiles on the diagonal are cut into products of few keys with all queries from there on."""
        return self.kv_chunk <= 256

    @property
    def masks(self) -> bool:
        """Whether some tile pair may have pairs that do not attend."""
        return self.restricted or self.ragged_queries or self.ragged_keys

    @property
    def ragged_queries(self) -> bool:
        """Whether the last tile of queries reaches beyond them."""
        return self.queries % self.q_block != 0

    @property
    def ragged_keys(self) -> bool:
        """Whether the last tile of keys reaches beyond them."""
        return self.keys % self.kv_block != 0


def make_spec(record: TiledAttention, blocks: Blocks, by_key: bool = False) -> Spec:
    """The constants of a record's kernels with given tiles."""
    (_, queries, heads, size), (_, keys, kv_heads, value_size) = record.query.shape, record.value.shape
    q_block, kv_block = _fitting(queries, blocks.queries), _fitting(keys, blocks.keys)
    left, right = band(record)
    plain = record.bias is None and record.logits_soft_cap is None
    indexed = record.q_positions is None and record.kv_positions is None and record.q_segment_ids is None
    restrictions = (record.q_segment_ids, record.mask, record.pattern)
    whole = q_block == kv_block and queries % q_block == 0 and keys % kv_block == 0
    return Spec(
        queries=queries,
        keys=keys,
        heads=heads,
        group=heads // kv_heads,
        size=size,
        value_size=value_size,
        q_block=q_block,
        kv_block=kv_block,
        q_chunk=math.gcd(q_block, blocks.q_chunk),
        kv_chunk=math.gcd(kv_block, blocks.kv_chunk),
        by_key=by_key,
        scale=record.softmax_scale,
        plain=plain,
        factor=record.softmax_scale * LOG2E if plain else LOG2E,
        biased=record.bias is not None and record.logits_soft_cap is None,
        left=left,
        right=right,
        cap=record.logits_soft_cap,
        threshold=dropout.threshold(record.dropout_prob) if record.dropout_prob > 0.0 else None,
        kept=1.0 / (1.0 - record.dropout_prob),
        precision=_precision(record),
        trapezoid=indexed and left is None and right == 0 and record.mask is None and record.pattern is None and whole,
        restricted=(left, right) != (None, None) or not all(x is None for x in restrictions),
        counted=_counted(record),
    )


def _counted(record: TiledAttention) -> bool:
    small = record.value.shape[3] <= LANES and record.value.dtype.itemsize == 2
    return small and is_wide(current_device().kind) and record.dropout_prob == 0.0


def padded(size: int) -> int:
    """A head size as the kernels have it: what memory takes for it anyway."""
    return -(-size // LANES) * LANES


def _fitting(length: int, block: int) -> int:
    """The block, no longer than what covers the length."""
    if block < 1 or block % LANES:
        raise ValueError(f"tile of {block}: wants a multiple of {LANES}")
    return min(block, padded(length))


def _precision(record: TiledAttention) -> lax.Precision | None:
    """Mosaic has products in one pass of bfloat16 and in six."""
    asked = product_precision(record.query.dtype, record.precision)
    return lax.Precision.HIGHEST if asked == lax.Precision.HIGH else asked
