"""The compile-time constants of the tiled-attention kernels."""

import dataclasses
import math
from typing import Any

import jax.numpy as jnp

from ejkernel.arithmetic import LOG2E
from ejkernel.families.tiled_attention import TiledAttention, causal_window_bounds
from ejkernel.planning import dropout
from ejkernel.planning.scalar_programs import ScalarProgram, scalar_program
from ejkernel_pallas.gpu.hopper.index_differences import scaled_difference
from ejkernel_pallas.gpu.hopper.split_boundaries import SplitBoundaries

FIXED_MAX_EXPONENT_LIMIT = 80.0
"""The largest exponent of two for which a fixed maximum of 0 works: float32 can then hold the sums."""
INITIAL_ROW_MAX = -1e38
"""The initial running maximum: below every score, and finite, so that no difference of two of them is NaN."""
SPLIT_BARRIER_BYTES = 512
"""Bytes of shared memory reserved for mbarriers in the forward kernel with splits."""
WORD_BITS = 32
"""Bits per word of a bit mask."""
COLUMNS_PER_MASK_WORD_SPAN = 4 * WORD_BITS
"""Columns of which a thread has one word of bits: a fourth of them."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class HopperSpec:
    """Constants of a kernel.

    Attributes:
        batch_size: Batch rows.
        q_len: Queries of a row.
        kv_len: Keys of a row.
        num_heads: Query heads.
        num_kv_heads: KV heads.
        head_dim: Head dimension of queries and keys.
        value_dim: Head dimension of values.
        dtype: Dtype of queries, keys and values.
        scale: Factor on the raw scores.
        soft_cap: Soft cap of the scores, or None.
        left_window: Band: `-left <= k - q`; None is open.
        right_window: Band: `k - q <= right`; None is open.
        has_segments: Whether there are segment ids.
        has_positions: Whether the band is one of positions, which are operands, instead of indices.
        has_pattern: Whether a pattern says which pairs attend.
        has_sinks: Whether there are sinks.
        dropout_threshold: Dropout drops a weight if the product of its row's and column's keys is below; 0 without
            dropout.
        dropout_scale: Factor on the weights that dropout keeps.
        keys_in_pages: Whether keys are in pages: then every tile of queries belongs to one sequence, whose keys and
            positions `Call.paged_key_access` has.
        has_key_starts: Whether such sequences may have a first key other than 0.
        blocks_per_split: Key blocks per split, counted from key 0, whose softmaxes are folded in order; 0 for one
            softmax over all keys of a row.
        is_batch_invariant: Whether the bits of a row must not depend on the other rows of the call.
        split_doublings: Key blocks from which on splits are twice as long.
        score_mod: The function of a score and its pair, or None.
        mask_mod: The function that says which pairs attend, or None.
    """

    batch_size: int
    q_len: int
    kv_len: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int
    dtype: Any
    scale: float
    soft_cap: float | None
    left_window: int | None
    right_window: int | None
    has_segments: bool
    has_pattern: bool
    has_sinks: bool
    dropout_threshold: int
    dropout_scale: float
    keys_in_pages: bool = False
    has_key_starts: bool = False
    has_positions: bool = False
    is_batch_invariant: bool = False
    blocks_per_split: int = 0
    split_doublings: tuple[int, ...] = ()
    score_mod: ScalarProgram | None = None
    mask_mod: ScalarProgram | None = None

    @property
    def group_size(self) -> int:
        """Returns query heads per KV head."""
        return self.num_heads // self.num_kv_heads

    @property
    def may_mask_pairs(self) -> bool:
        """Returns whether any pair of indices may not attend."""
        return (
            self.left_window is not None
            or self.right_window is not None
            or self.has_segments
            or self.has_block_lists
            or self.keys_in_pages
        )

    @property
    def has_block_lists(self) -> bool:
        """Returns whether the blocks that a tile loops over come from lists: with a pattern, with `mask_mod`, and if
        they begin with documents.
        """
        return self.has_pattern or self.mask_mod is not None or self.lists_first_keys

    @property
    def lists_first_keys(self) -> bool:
        """Returns whether lists have first keys of blocks, which begin with the documents of packed rows, so that the
        bits of a row do not depend on other documents.
        """
        has_other_lists = self.has_pattern or self.mask_mod is not None
        return self.is_batch_invariant and self.has_segments and not has_other_lists and not self.has_dropout

    @property
    def has_key_ranges(self) -> bool:
        """Returns whether the range of keys of every query is an operand."""
        return self.has_segments or self.has_positions

    @property
    def has_dropout(self) -> bool:
        """Returns whether there is dropout."""
        return self.dropout_threshold > 0

    @property
    def masks_before_full_tiles(self) -> bool:
        """Returns whether tiles before the full ones can be partial, too."""
        if self.has_block_lists:
            return self.lists_first_keys and self.left_window is not None
        return self.left_window is not None or self.has_key_ranges or self.has_key_starts

    @property
    def split_boundaries(self) -> SplitBoundaries:
        """Returns the boundaries of splits in key blocks."""
        return SplitBoundaries(self.blocks_per_split, self.split_doublings)

    @property
    def uses_ping_pong(self) -> bool:
        """Returns whether consumer warpgroups are scheduled ping-pong: one issues products while the other
        exponentiates.

        On an H200 it helps if exponentials cost more than products, or products are large; with values of 128 they
        alternate without it, and named barriers cost 2%.
        """
        return self.value_dim != 128 or self.soft_cap is not None or self.score_mod is not None

    @property
    def rescales_lazily(self) -> bool:
        """Returns whether the accumulator is rescaled lazily: only if a row's maximum grew by more than a threshold.

        On an H200 it makes head dimension 256 up to 16% faster, whose accumulator is twice as large as scores and
        weights; it costs others 1% to 3%, since the branch takes longer than what it saves.
        """
        return self.value_dim > 128

    @property
    def fixes_row_max_at_zero(self) -> bool:
        """Returns whether the row maximum is fixed at 0, so that no maximum is computed and nothing is rescaled.

        A soft cap bounds scores, so their powers of two are bounded: bfloat16 has the same precision for such weights,
        and float32 can hold their sums.
        """
        return (
            self.soft_cap is not None
            and self.score_mod is None
            and self.softmax_scale_log2 <= FIXED_MAX_EXPONENT_LIMIT
            and self.dtype == jnp.bfloat16
        )

    @property
    def fuses_soft_cap(self) -> bool:
        """Returns whether `compute_capped_weights` computes tanh and exponential together for full blocks.

        With head dimension 256, where products take four times as long as with 64, a soft cap costs 3% without it. The
        bits of a weight depend on the products of the other rows of its warp.
        """
        return self.fixes_row_max_at_zero and self.head_dim <= 128 and not self.is_batch_invariant

    @property
    def product_scale(self) -> float:
        """Returns the factor on a raw product before `softmax_scale_log2`: for the soft cap's argument; 1 without a
        soft cap.
        """
        return 1.0 if self.soft_cap is None else self.scale / self.soft_cap

    @property
    def softmax_scale_log2(self) -> float:
        """Returns the factor that converts a raw product, the soft cap's tanh, or what `score_mod` returns, to base
        2.
        """
        return (self.score_unit if self.score_mod is None else self.modified_score_unit) * LOG2E

    @property
    def modified_score_unit(self) -> float:
        """Returns the unit in which kernels compute what `score_mod` returns.

        A function that adds a multiple of an index difference, as ALiBi does, returns products in their own unit, plus
        the multiple divided by it, if that is exact: a power of two.
        """
        is_power_of_two = math.frexp(self.score_unit)[0] == 0.5
        has_multiple = self.score_mod is not None and scaled_difference(self.score_mod) is not None
        return self.score_unit if has_multiple and is_power_of_two else 1.0

    @property
    def score_unit(self) -> float:
        """Returns the factor that converts a raw product, or the soft cap's tanh, to a score."""
        return self.scale if self.soft_cap is None else self.soft_cap

    @property
    def has_pair_functions(self) -> bool:
        """Returns whether there is a `score_mod` or a `mask_mod`."""
        return self.score_mod is not None or self.mask_mod is not None

    @property
    def hoists_function_inputs(self) -> bool:
        """Returns whether what the functions of pairs compute of a head or a row stays in registers for all key blocks:
        functions of the query or the key that load no arrays, whose addresses would take more registers.
        """
        functions = [x for x in (self.score_mod, self.mask_mod) if x is not None]
        read = frozenset().union(*(x.inputs_read for x in functions))
        return bool(read & {"q_idx", "k_idx"}) and not any(x.array_ranks for x in functions)

    def masks_by_function_alone(self, block_kv: int) -> bool:
        """Returns whether `mask_mod` alone masks pairs: blocks of keys are whole, so no key is past the last one."""
        has_other_mask = self.has_segments or self.has_pattern or self.keys_in_pages
        has_window = self.left_window is not None or self.right_window is not None
        return self.mask_mod is not None and not has_other_mask and not has_window and self.kv_len % block_kv == 0

    @property
    def has_score_slope(self) -> bool:
        """Returns whether a score before `score_mod` has another gradient than the one after it."""
        return self.score_mod is not None and not self.score_mod.has_constant_slope

    @property
    def has_slope(self) -> bool:
        """Returns whether a scaled product has another gradient than its score."""
        return self.soft_cap is not None or self.has_score_slope


def make_spec(record: TiledAttention) -> HopperSpec:
    """Returns the constants of a record's kernels."""
    (b, t, h, d), (_, s, hk, _) = record.query.shape, record.key.shape
    left, right = causal_window_bounds(record)
    return HopperSpec(
        batch_size=b,
        q_len=t,
        kv_len=s,
        num_heads=h,
        num_kv_heads=hk,
        head_dim=d,
        value_dim=record.value.shape[3],
        dtype=jnp.dtype(record.query.dtype),
        scale=record.softmax_scale,
        soft_cap=record.logits_soft_cap,
        left_window=left,
        right_window=right,
        has_segments=record.q_segment_ids is not None and record.kv_segment_ids is not None,
        has_positions=(left, right) != (None, None)
        and (record.q_positions is not None or record.kv_positions is not None),
        has_pattern=record.pattern is not None,
        has_sinks=record.softmax_aux is not None,
        dropout_threshold=dropout.dropout_threshold(record.dropout_prob),
        dropout_scale=1.0 / (1.0 - record.dropout_prob),
        score_mod=None if record.score_mod is None else scalar_program(record.score_mod),
        mask_mod=None if record.mask_mod is None else scalar_program(record.mask_mod),
    )
