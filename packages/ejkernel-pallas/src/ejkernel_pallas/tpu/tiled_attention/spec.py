"""The compile-time constants of a tiled-attention kernel: everything about a record except arrays and traced
numbers.

Layout of scores: if a kernel accumulates for queries, queries are along sublanes and keys along lanes; if it
accumulates for keys (`accumulates_for_keys`), the other way around. So no kernel transposes weights, and an accumulator
has the shape of its tile.
"""

import dataclasses
import math
from typing import NamedTuple

from jax import lax

from ejkernel.arithmetic import LOG2E, cdiv
from ejkernel.families.tiled_attention import TiledAttention, causal_window_bounds
from ejkernel.ops.device import current_device
from ejkernel.planning import dropout
from ejkernel.planning.precision import product_precision
from ejkernel_pallas.tpu.generations import has_256_wide_mxu
from ejkernel_pallas.tpu.mosaic.split_functions import SplitFunction, split_function
from ejkernel_pallas.tpu.mosaic.vectors import LANES

MASKED_SCORE = -3e38
"""The smallest score as a power of two: a bias of the smallest finite float32 must stay finite when multiplied by
log2(e).
"""


class TileSizes(NamedTuple):
    """Sizes of a tile and of its products; multiples of 128.

    Attributes:
        queries: Queries per tile.
        keys: Keys per tile.
        chunk_q: Queries per product.
        chunk_kv: Keys per product.
        batch_invariant: Whether all products of all calls have the sizes of a chunk.
    """

    queries: int
    keys: int
    chunk_q: int
    chunk_kv: int
    batch_invariant: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class TiledSpec:
    """The compile-time constants of a kernel.

    Attributes:
        num_queries: T.
        num_keys: S.
        num_heads: The number of query heads.
        group_size: The number of query heads per KV head.
        head_dim: D.
        value_dim: Dv.
        block_q: Queries per tile; a multiple of 128.
        block_kv: Keys per tile; a multiple of 128.
        chunk_q: Queries per product; a tile has several products that overlap; divides `block_q`.
        chunk_kv: Keys per product; divides `block_kv`.
        accumulates_for_keys: Whether the kernel accumulates for a key block, and has keys along sublanes.
        score_scale: Factor on the scores (`softmax_scale`).
        score_is_scaled_product: Whether a score is just a product times a scale; the scale is then a part of
            `log2_scale`.
        log2_scale: Factor on a score that turns its exponential into a power of two.
        has_bias: Whether a bias or `score_mod` may make scores as small as the smallest float32, or -inf.
        window_left: Query q attends no key before q - window_left; None is open.
        window_right: Query q attends no key after q + window_right; None is open.
        soft_cap: Soft cap, or None.
        dropout_threshold: Dropout drops a pair whose hash is below it; None without dropout.
        dropout_scale: Factor 1 / (1 - p) on the weights that dropout keeps.
        precision: Precision of the matrix products.
        cuts_diagonal_chunks: Whether chunks on the causal diagonal are cut along it, for square tiles without any other
            mask.
        may_mask_pairs: Whether band, segments, mask, pattern or `mask_mod` may mask pairs.
        sums_weights_on_mxu: Whether the MXU sums the weights of a row, in output columns that a product with values
            leaves idle.
        score_mod: The two parts of `score_mod`, or None.
        mask_mod: The two parts of `mask_mod`, or None.
        differentiated_row: The row of `score_mod` whose gradient the kernel computes; None for the score's.
    """

    num_queries: int
    num_keys: int
    num_heads: int
    group_size: int
    head_dim: int
    value_dim: int
    block_q: int
    block_kv: int
    chunk_q: int
    chunk_kv: int
    accumulates_for_keys: bool
    score_scale: float
    score_is_scaled_product: bool
    log2_scale: float
    has_bias: bool
    window_left: int | None
    window_right: int | None
    soft_cap: float | None
    dropout_threshold: int | None
    dropout_scale: float
    precision: lax.Precision | None
    cuts_diagonal_chunks: bool
    may_mask_pairs: bool
    sums_weights_on_mxu: bool
    score_mod: SplitFunction | None = None
    mask_mod: SplitFunction | None = None
    differentiated_row: int | None = None

    @property
    def cuts_diagonal_by_keys(self) -> bool:
        """Returns whether diagonal tiles are cut into chunks of few keys, each with all queries from the diagonal
        on.
        """
        return self.chunk_kv <= 256

    @property
    def needs_masks(self) -> bool:
        """Returns whether some tile pair may have masked pairs."""
        return self.may_mask_pairs or self.has_partial_query_tile or self.has_partial_key_tile

    @property
    def has_partial_query_tile(self) -> bool:
        """Returns whether the last tile of queries extends beyond the last query."""
        return self.num_queries % self.block_q != 0

    @property
    def has_partial_key_tile(self) -> bool:
        """Returns whether the last tile of keys extends beyond the last key."""
        return self.num_keys % self.block_kv != 0


def make_spec(record: TiledAttention, blocks: TileSizes, accumulates_for_keys: bool = False) -> TiledSpec:
    """Returns the constants of a record's kernels with given tiles."""
    (_, queries, heads, size), (_, keys, kv_heads, value_size) = record.query.shape, record.value.shape
    block_q, block_kv = _fit_block(queries, blocks.queries), _fit_block(keys, blocks.keys, blocks.batch_invariant)
    left, right = causal_window_bounds(record)
    scale_only = record.bias is None and record.logits_soft_cap is None and record.score_mod is None
    indexed = record.q_positions is None and record.kv_positions is None and record.q_segment_ids is None
    restrictions = (record.q_segment_ids, record.mask, record.pattern, record.mask_mod)
    no_pair_masks = all(x is None for x in (record.mask, record.pattern, record.mask_mod))
    whole = block_q == block_kv and queries % block_q == keys % block_kv == 0 and not blocks.batch_invariant
    return TiledSpec(
        num_queries=queries,
        num_keys=keys,
        num_heads=heads,
        group_size=heads // kv_heads,
        head_dim=size,
        value_dim=value_size,
        block_q=block_q,
        block_kv=block_kv,
        chunk_q=math.gcd(block_q, blocks.chunk_q),
        chunk_kv=math.gcd(block_kv, blocks.chunk_kv),
        accumulates_for_keys=accumulates_for_keys,
        score_scale=record.softmax_scale,
        score_is_scaled_product=scale_only,
        log2_scale=record.softmax_scale * LOG2E if scale_only else LOG2E,
        has_bias=record.bias is not None or record.score_mod is not None,
        window_left=left,
        window_right=right,
        soft_cap=record.logits_soft_cap,
        dropout_threshold=dropout.dropout_threshold(record.dropout_prob) if record.dropout_prob > 0.0 else None,
        dropout_scale=1.0 / (1.0 - record.dropout_prob),
        precision=_precision(record),
        cuts_diagonal_chunks=indexed and (left, right) == (None, 0) and no_pair_masks and whole,
        may_mask_pairs=(left, right) != (None, None) or not all(x is None for x in restrictions),
        sums_weights_on_mxu=_sums_on_mxu(record),
        score_mod=None if record.score_mod is None else split_function(record.score_mod.program),
        mask_mod=None if record.mask_mod is None else split_function(record.mask_mod.program),
    )


def _sums_on_mxu(record: TiledAttention) -> bool:
    small = record.value.shape[3] <= LANES and record.value.dtype.itemsize == 2
    return small and has_256_wide_mxu(current_device().kind) and record.dropout_prob == 0.0


def pad_head_dim(size: int) -> int:
    """Returns the head dimension padded to whole lanes, which it takes in VMEM anyway."""
    return cdiv(size, LANES) * LANES


def _fit_block(length: int, block: int, batch_invariant: bool = False) -> int:
    """Returns the block size, no larger than needed to cover the length unless all calls have the same blocks."""
    if block < 1 or block % LANES:
        raise ValueError(f"tile of {block}: wants a multiple of {LANES}")
    return block if batch_invariant else min(block, pad_head_dim(length))


def _precision(record: TiledAttention) -> lax.Precision | None:
    """Returns the nearest precision that Mosaic has: one bfloat16 pass or six; three passes become six."""
    requested_precision = product_precision(record.query.dtype, record.precision)
    return lax.Precision.HIGHEST if requested_precision == lax.Precision.HIGH else requested_precision
