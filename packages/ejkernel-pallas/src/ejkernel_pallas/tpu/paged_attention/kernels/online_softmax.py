"""Online softmax of a work item's rows: its state, the update with a chunk of keys, and the epilogue.

    parts 0, 1, 2, ...: the rows of one head and one chunk of keys each; `lookahead` = 2

    MXU      s0   s1   s2   pv0  s3   pv1  s4   pv2          s = q k^T, pv = weights v
    VPU, EUP           p0        p1        p2                p = exp2(s - row_max), alpha, row_sum
    scratch  scores[n % 2] ─► weights[n % 2] ─► acc

Scores are computed ahead of the softmax, so that the MXU always has a product while the vector units work on an older
part.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from ejkernel.arithmetic import LOG2E
from ejkernel_pallas.tpu.mosaic.division import divide
from ejkernel_pallas.tpu.mosaic.launch import Ref
from ejkernel_pallas.tpu.mosaic.loops import for_each_index, fori_loop
from ejkernel_pallas.tpu.mosaic.vectors import LANES, column_to_row, lane_groups, matrix_product, repeat_lanes
from ejkernel_pallas.tpu.paged_attention.kernels.copies import WorkItem
from ejkernel_pallas.tpu.paged_attention.kernels.load_codes import CodeChunk
from ejkernel_pallas.tpu.paged_attention.kernels.load_keys import KeyChunk, key_and_head_of_index, num_head_groups
from ejkernel_pallas.tpu.paged_attention.kernels.operands import has_score_mod, score_unit, softmax_unit
from ejkernel_pallas.tpu.paged_attention.kernels.pair_functions import FunctionPairs, apply_functions
from ejkernel_pallas.tpu.paged_attention.kernels.refs import PagedRefs, ProductBuffers
from ejkernel_pallas.tpu.paged_attention.spec import SMALL_PRODUCT_ROWS, PagedSpec
from ejkernel_pallas.tpu.tiled_attention.kernels import score_chunk

NO_TOKEN_POSITION = 2**30
"""Larger than any token index of a tile: stands for the first token that attends a key if no token does."""
NUM_PRODUCT_BUFFERS = 2
"""Scratch memory of parts is double buffered, so that a write need not wait for the reads of the part before."""
ROWS_PER_SLICE = 64
"""The number of rows of a large product that are rescaled and stored together: as many as registers hold of the
accumulator.
"""


class ProductRows(NamedTuple):
    """The query rows of one product.

    Attributes:
        buffer_slot: The slot of `query_buffer` that has the queries.
        first_row: Index of the first row in the tile.
        num_rows: The number of rows.
        tile_position: Position of the tile's first token in its sequence.
    """

    buffer_slot: Any
    first_row: Any
    num_rows: int
    tile_position: Any

    @property
    def row_slice(self) -> Any:
        """Returns the rows as a slice of the tile."""
        return pl.ds(self.first_row, self.num_rows)


ScoreMask = Callable[[list[jax.Array]], list[jax.Array]]
"""Masks scores, given as groups of 128 lanes [rows, 128]: sets them to -inf where a pair does not attend."""


class HeadChunk(NamedTuple):
    """One product of rows with keys.

    Attributes:
        head: Index of the KV head.
        rows: The query rows.
        load_keys: Loads the keys, [n, D].
        load_values: Loads the values, [n, Dv].
        apply_mask: Masks the scores; None if all pairs attend.
        load_rotary: Loads the rotary part of the keys, [Dr, n]; None if it is in the same rows as the keys.
        key_offsets: float32 [1, n], the keys' positions less the length of the sequence's context, for ALiBi's term;
            None without that term.
        bias_index: Index in `row_bias` of the keys' bias for pairs; None without it.
        codes: Signs and norms, if the cache has codes.
        key_chunk: The chunk of keys.
        key_positions: int32 [1, n], the keys' positions, for functions; None without them.
    """

    head: Any
    rows: ProductRows
    load_keys: Callable[[], jax.Array]
    load_values: Callable[[], jax.Array]
    apply_mask: ScoreMask | None
    load_rotary: Callable[[], jax.Array] | None = None
    key_offsets: jax.Array | None = None
    bias_index: int | None = None
    codes: CodeChunk | None = None
    key_chunk: KeyChunk | None = None
    key_positions: jax.Array | None = None


def init_softmax(refs: PagedRefs, head: Any, count: int) -> None:
    """Initialises the softmax state of a head's first `count` rows. A sink is a key without a value, and starts the
    state.
    """
    rows = (head, pl.ds(0, count), slice(None))
    if refs.sinks is not None:
        refs.row_max[rows] = refs.sinks[rows]
        # The sink's weight is 1; `row_sum` holds one partial sum per lane.
        refs.row_sum[rows] = jnp.full((count, LANES), 1.0 / LANES, jnp.float32)
    else:
        refs.row_max[rows] = jnp.full((count, LANES), -jnp.inf, jnp.float32)
        refs.row_sum[rows] = jnp.zeros((count, LANES), jnp.float32)
    # The accumulator must be zeroed: NaN in it would remain after a rescale by 0.
    refs.acc[rows] = jnp.zeros((count, refs.acc.shape[2]), jnp.float32)


def store_additive_mask_of_one_token(refs: PagedRefs, item: WorkItem, chunks: list[KeyChunk], spec: PagedSpec) -> None:
    """Stores the additive mask of chunks for an item that has one token: -inf for masked keys."""

    def one(n: Any) -> None:
        at = chunks[0]._replace(first_key=chunks[0].first_key + n * spec.chunk_kv)
        exists, _ = _attended_keys(refs, item, at, spec)
        refs.key_mask[pl.ds(n, 1), :] = jnp.where(exists, 0.0, -jnp.inf)

    for_each_index(len(chunks), one)


def _attended_keys(refs: PagedRefs, item: WorkItem, at: KeyChunk, spec: PagedSpec) -> tuple[jax.Array, jax.Array]:
    """Returns which keys of a chunk any row attends, bool [1, n], and every key's offset in the chunk."""
    offset, _ = key_and_head_of_index(
        lax.broadcasted_iota(jnp.int32, (1, at.num_keys * spec.heads_per_product), 1), at.num_keys, spec
    )
    inside = (offset >= at.attended_start - at.first_key) & (offset < at.attended_end - at.first_key)
    return inside & (_missing_pages(refs, item, at, offset, spec) == 0), offset


def key_offsets_from_context(refs: PagedRefs, item: WorkItem, at: KeyChunk, spec: PagedSpec) -> jax.Array | None:
    """Returns the positions of a chunk's keys, float32 [1, n], less the tokens before the queries unless each row has
    its own number of these; None if no term of the scores needs them.
    """
    if not spec.has_slopes:
        return None
    context = 0 if spec.has_row_contexts else refs.context_lengths[item.sequence]
    offset, _ = key_and_head_of_index(
        lax.broadcasted_iota(jnp.int32, (1, at.num_keys * spec.heads_per_product), 1), at.num_keys, spec
    )
    return (offset + (at.first_key - context)).astype(jnp.float32)


def make_score_mask(
    refs: PagedRefs, item: WorkItem, rows: ProductRows, at: KeyChunk, n: int, spec: PagedSpec
) -> ScoreMask | None:
    """Returns the mask of the n-th chunk's scores, or None if all pairs attend.

    The mask is recomputed for every head: there are too few mask registers to keep it between heads.
    """
    lanes = range(0, at.num_keys * spec.heads_per_product, LANES)
    if not at.needs_mask and spec.heads_per_product == 1:
        return None
    by_first_head: dict[int, Any] = {}
    if spec.heads_per_product > 1:
        for start in lanes:  # lane groups from the same part of words have the same order of heads
            by_first_head.setdefault(_first_head(start, at, spec), _head_mask(rows, start, at, spec))
    if spec.stores_score_limits:
        by_first_head = {
            n_mask: _score_limit_ref(refs, n_mask, mask, n) for n_mask, mask in enumerate(by_first_head.values())
        }
    head_masks = [by_first_head[_first_head(start, at, spec)] if by_first_head else None for start in lanes]
    if not at.needs_mask:
        return lambda scores: list(map(_mask_scores, head_masks, scores))
    if spec.tokens_per_tile == 1:  # the keys from `low` to `high` are then exactly those that the row attends
        masked = [refs.key_mask.at[n : n + 1, lane : lane + LANES] for lane in lanes]
        return lambda scores: [
            _mask_keys(_mask_scores(head_mask, x), y[...], spec)
            for head_mask, x, y in zip(head_masks, scores, masked, strict=True)
        ]
    exists, offset = _attended_keys(refs, item, at, spec)
    key = at.first_key - rows.tile_position + offset
    first = 0 if spec.window_right is None else key - spec.window_right
    last = key if spec.window_left is None else key + spec.window_left
    if spec.attention_chunk is not None:
        # A key is attended by the tokens of its own chunk.
        size = spec.attention_chunk
        begin = divide(at.first_key + offset, size) * size - rows.tile_position
        end = begin + (size - 1)
        first, last = jnp.maximum(first, begin), end if spec.window_left is None else jnp.minimum(last, end)
    first = jnp.where(exists, first, NO_TOKEN_POSITION)
    bands = list(zip(lane_groups(first), lane_groups(last), strict=True))
    return lambda scores: [
        _mask_scores(_attending_pairs(refs, rows, *x, spec), y) for x, y in zip(bands, scores, strict=True)
    ]


def _mask_scores(mask: Any, scores: jax.Array) -> jax.Array:
    """Returns masked scores: -inf where a boolean mask is False, the minimum with a mask of limits, unchanged
    without a mask.
    """
    if mask is None:
        return scores
    return jnp.where(mask, scores, -jnp.inf) if isinstance(mask, jax.Array) else jnp.minimum(scores, mask[...])


def _mask_keys(scores: jax.Array, additive_mask: jax.Array, spec: PagedSpec) -> jax.Array:
    """Returns scores with an additive mask; `score_mod` may return NaN for masked keys, to which -inf adds NaN."""
    if not has_score_mod(spec):
        return scores + additive_mask
    return jnp.where(additive_mask == 0.0, scores, -jnp.inf)


def _score_limit_ref(refs: PagedRefs, index: int, mask: jax.Array, n: int) -> Any:
    """Returns the memory of a mask as upper limits of scores. All chunks have the same mask, which the first one
    writes.
    """
    limit = refs.score_limits.at[index]
    if n == 0:
        limit[...] = jnp.where(mask, jnp.inf, -jnp.inf)
    return limit


def _first_head(start: int, at: KeyChunk, spec: PagedSpec) -> int:
    """Returns the KV head of the first key in a lane group."""
    cache = spec.cache_layout
    return (
        start // (at.num_keys * spec.heads_per_product // cache.kv_heads_per_word_row)
        if cache.interleaves_keys_and_values
        else 0
    )


def _head_mask(rows: ProductRows, start: int, at: KeyChunk, spec: PagedSpec) -> jax.Array:
    """Returns which keys belong to the KV head that a row's query reads."""
    shape = (rows.num_rows, LANES)
    _, head = key_and_head_of_index(start + lax.broadcasted_iota(jnp.int32, shape, 1), at.num_keys, spec)
    row, group = lax.broadcasted_iota(jnp.int32, shape, 0), spec.group_size // spec.heads_per_product
    assert head is not None  # there are several heads here
    return divide(row, group) == head


def _missing_pages(refs: PagedRefs, item: WorkItem, at: KeyChunk, offset: jax.Array, spec: PagedSpec) -> jax.Array:
    """Returns which keys of a chunk are in pages that are missing from the table, int32."""
    slots, first = spec.cache_layout.slots_per_page, divide(at.first_key, spec.cache_layout.slots_per_page)

    def add_missing_page(k: jax.Array, missing: jax.Array) -> jax.Array:
        page_id = refs.page_table[
            item.sequence * spec.pages_per_sequence + jnp.minimum(first + k, spec.pages_per_sequence - 1)
        ]
        start = (first + k) * slots - at.first_key
        inside = (offset >= start) & (offset < start + slots)
        return missing + jnp.where(inside, (page_id < 0).astype(jnp.int32), 0)

    count = jnp.where(item.missing_pages != 0, at.num_keys // slots + 2, 0)
    return fori_loop(jnp.int32(0), count, add_missing_page, jnp.zeros(offset.shape, jnp.int32))


def _attending_pairs(
    refs: PagedRefs, rows: ProductRows, first_token: jax.Array, last_token: jax.Array, spec: PagedSpec
) -> jax.Array:
    """Returns which pairs of a lane group attend, from the first and last token of the tile that attend each key."""
    shape = (rows.num_rows, LANES)
    token = (
        refs.position_buffer[rows.buffer_slot, rows.row_slice, :]
        if spec.has_row_positions
        else refs.token_of_row[rows.row_slice, :]
    )
    mask = token >= jnp.broadcast_to(first_token, shape)
    return mask & (token <= jnp.broadcast_to(last_token, shape)) if spec.has_last_token_per_key else mask


def update_softmax(refs: PagedRefs, chunks: list[HeadChunk], lookahead: int, spec: PagedSpec) -> None:
    """Updates the softmax of rows with keys, part by part; scores are computed `lookahead` parts ahead.

    Scores, weights and alpha are kept in scratch memory, because register pressure would spill them otherwise. The sum
    of a row is the sum of the lanes of `row_sum`. Decode reduces the lanes right after the last product, where the
    reduction's latency is hidden and the epilogue is left with less work.
    """
    for n in range(len(chunks) + lookahead):
        if n < len(chunks):
            _store_scores(refs, chunks[n], n, spec)
        if n >= lookahead:
            _update_chunk(refs, chunks[n - lookahead], n - lookahead, spec)
    last = chunks[-(spec.kv_heads // num_head_groups(spec)) :] if spec.tokens_per_tile == 1 else ()
    for chunk in last:  # the last chunk of each head
        rows = (chunk.head, chunk.rows.row_slice, slice(None))
        # The sum is spread over the lanes again, so that the next block adds to partial sums as before.
        row_sum = jnp.sum(refs.row_sum[rows], axis=1, keepdims=True) * (1.0 / LANES)
        refs.row_sum[rows] = jnp.broadcast_to(row_sum, (chunk.rows.num_rows, LANES))


def product_buffers(rows: int, keys: int, dtype: Any) -> ProductBuffers:
    """Returns the scratch memory of parts; `dtype` is that of weights."""
    shapes = ((keys, jnp.float32), (keys, dtype), (LANES, jnp.float32))
    return ProductBuffers(*(score_chunk.double_buffer((rows, width), dtype) for width, dtype in shapes))


def _product_buffers_of_rows(refs: PagedRefs, rows: int, spec: PagedSpec) -> ProductBuffers:
    """Returns the scratch memory for parts of `rows` rows."""
    if rows == spec.smallest_product_rows:
        return refs.small_product_buffers
    assert refs.large_product_buffers is not None  # there are larger products here
    return refs.large_product_buffers


def _double_buffer_slice(buffers: tuple[Ref, Ref], n: int, shape: tuple[int, ...]) -> Ref:
    """Returns the slice of a double buffer that part n uses."""
    (rows, width), ref = shape, buffers[n % NUM_PRODUCT_BUFFERS]
    return ref.at[pl.ds(n // NUM_PRODUCT_BUFFERS * rows % ref.shape[0], rows), :width]


def _store_scores(refs: PagedRefs, chunk: HeadChunk, n: int, spec: PagedSpec) -> None:
    s = _compute_scores(refs, chunk, spec)
    if chunk.apply_mask is not None:
        s = jnp.concatenate(chunk.apply_mask(lane_groups(s)), axis=1)
    _double_buffer_slice(_product_buffers_of_rows(refs, s.shape[0], spec).scores, n, s.shape)[...] = s


def _update_chunk(refs: PagedRefs, chunk: HeadChunk, n: int, spec: PagedSpec) -> None:
    """Updates row_max, row_sum and acc with a part whose scores are in scratch memory."""
    rows, value = (chunk.head, chunk.rows.row_slice, slice(None)), chunk.load_values()
    keys_axis = 1 if spec.cache_layout.tokens_along_lanes else 0
    shape = (chunk.rows.num_rows, value.shape[keys_axis])
    buffers = _product_buffers_of_rows(refs, chunk.rows.num_rows, spec)
    scores, weights = (_double_buffer_slice(pair, n, shape) for pair in (buffers.scores, buffers.weights))
    alpha = _double_buffer_slice(buffers.alpha, n, (chunk.rows.num_rows, LANES))
    before = refs.row_max[rows]
    # The maximum is taken across lane groups on the VPU first, so that the slow XLU has one reduction across lanes
    # left.
    highest = functools.reduce(jnp.maximum, lane_groups(scores[...]))
    shift = row_max = jnp.maximum(before, jnp.max(highest, axis=1, keepdims=True))
    if chunk.apply_mask is not None or spec.functions is not None:
        # In rows without any key so far exp2(-inf - 0) = 0, not NaN.
        shift = jnp.where(row_max == -jnp.inf, 0.0, row_max)
    refs.row_max[rows] = row_max
    alpha[...] = _exponential(before - shift, spec)
    # Scores are loaded again instead of kept in registers across the reduction, where they would spill.
    weights_f32 = _exponential(scores[...] - repeat_lanes(shift, shape[1]), spec)
    refs.row_sum[rows] = alpha[...] * refs.row_sum[rows] + functools.reduce(jnp.add, lane_groups(weights_f32))
    if chunk.codes is not None:
        weights_f32 *= chunk.codes.load_value_norms()
    weights[...] = weights_f32.astype(spec.weights_dtype)
    _rescale_and_accumulate(
        refs, chunk, alpha, _multiply(weights[...], value, (1, keys_axis), spec.weights_dtype, spec)
    )


def _exponential(difference: jax.Array, spec: PagedSpec) -> jax.Array:
    """Returns the exponential function of a difference of scores in the unit of the softmax."""
    return jnp.exp2(difference * LOG2E if has_score_mod(spec) else difference)


def _log_sum_exp(row_max: jax.Array, row_sum: jax.Array, spec: PagedSpec) -> jax.Array:
    """Returns the natural logarithm of the softmax denominator."""
    if has_score_mod(spec):
        return row_max + jnp.log2(row_sum) * (1.0 / LOG2E)
    # The sum is scaled: to scale both terms spills registers on v7x.
    return (row_max + jnp.log2(row_sum)) * (1.0 / LOG2E)


def _rescale_and_accumulate(refs: PagedRefs, chunk: HeadChunk, alpha: Ref, product: jax.Array) -> None:
    """Rescales the accumulator of a part's rows, and adds the part's product to it.

    The accumulator of a large product is stored at an offset that the compiler does not know. It then cannot prove that
    the next slice's load is independent, and keeps the load after this store. Otherwise it would rescale about forty
    registers long before there is something to add, and spill them.
    """
    count = chunk.rows.num_rows
    # `first_item_of_core[0]` is always 0, which the compiler does not know.
    size, same = (count, 0) if count <= SMALL_PRODUCT_ROWS else (ROWS_PER_SLICE, refs.first_item_of_core[0])
    for start in range(0, count, size):
        end = min(start + size, count)
        span = pl.ds(chunk.rows.first_row + start, end - start)
        rescaled = repeat_lanes(alpha[start:end], product.shape[1]) * refs.acc[chunk.head, span, :]
        refs.acc[chunk.head + same, span, :] = rescaled + product[start:end]


def write_results(refs: PagedRefs, head: Any, rows: ProductRows, spec: PagedSpec) -> None:
    """Writes output and lse of rows (the epilogue) into the buffers that are copied to HBM."""
    row_max = refs.row_max[head, rows.row_slice, :]
    row_sum = refs.row_sum[head, rows.row_slice, :]
    same = spec.tokens_per_tile == 1
    row_sum = row_sum * LANES if same else _sums_of_lanes(row_sum, spec)
    # The key of the maximum has weight 1, so a row with keys has a sum of at least 1. A row without keys has row_sum =
    # acc = 0 and row_max = -inf: its output becomes 0 and its lse -inf without a branch.
    row_sum = jnp.maximum(row_sum, 1.0)
    lse = _log_sum_exp(row_max, row_sum, spec)
    factor = spec.value_scale / row_sum
    acc = refs.acc[head, rows.row_slice, :]
    output = refs.output_buffer
    output[rows.buffer_slot, head, rows.row_slice, :] = (repeat_lanes(factor, acc.shape[1]) * acc).astype(output.dtype)
    for start in range(0, rows.num_rows, LANES):
        _write_column_as_lanes(
            refs.lse_buffer, lse[start : start + LANES], (rows.buffer_slot, head), rows.first_row + start
        )


def _sums_of_lanes(x: jax.Array, spec: PagedSpec) -> jax.Array:
    """Returns the sum of each row of [rows, 128], in every lane; where products are equal, so are the arrays summed."""
    size = min(spec.smallest_product_rows if spec.has_equal_products else x.shape[0], x.shape[0])
    sums = [jnp.sum(x[n : n + size], axis=1, keepdims=True) for n in range(0, x.shape[0], size)]
    return jnp.broadcast_to(sums[0] if len(sums) == 1 else jnp.concatenate(sums), x.shape)


def _write_column_as_lanes(ref: Any, x: jax.Array, index: tuple[Any, ...], start: Any) -> None:
    """Writes [n, 128], the same in every lane, as n lanes of a row, beginning at a lane that is a multiple of 128."""
    start = start if isinstance(start, int) else pl.multiple_of(start, LANES)
    ref[(*index, slice(None), pl.ds(start, LANES))] = column_to_row(x)


def _compute_scores(refs: PagedRefs, chunk: HeadChunk, spec: PagedSpec) -> jax.Array:
    """Returns scores in the unit of the softmax, before all masks but that of functions."""
    s = _unmodified_scores(refs, chunk, spec)
    if chunk.key_chunk is None or chunk.key_positions is None:
        return s
    slot, row, count, position = chunk.rows
    pairs = FunctionPairs(chunk.head, slot, row, count, position, chunk.key_chunk, chunk.key_positions)
    return apply_functions(refs, s, pairs, spec)


def _unmodified_scores(refs: PagedRefs, chunk: HeadChunk, spec: PagedSpec) -> jax.Array:
    """Returns scores before functions and masks, in the unit of the softmax."""
    query = refs.query_buffer[chunk.rows.buffer_slot, chunk.head, chunk.rows.row_slice, :]
    if chunk.codes is not None:
        s = _code_scores(query, chunk, chunk.codes, spec)
    elif chunk.load_rotary is None:
        s = _multiply(
            query, chunk.load_keys(), (1, 0 if spec.cache_layout.tokens_along_lanes else 1), spec.operand_dtype, spec
        )
    else:  # latent rows and rotary columns take two products, since they cannot be one operand
        s = _multiply(
            query[:, : spec.cache_layout.elements_per_row], chunk.load_keys(), (1, 1), spec.operand_dtype, spec
        )
        s += _multiply(
            query[:, spec.cache_layout.elements_per_row :], chunk.load_rotary(), (1, 0), spec.operand_dtype, spec
        )
    unit = score_unit(spec)
    s = s * (spec.score_scale * unit)
    if chunk.key_offsets is not None:
        slopes = refs.alibi_slopes[chunk.head, chunk.rows.row_slice, :]
        columns = lane_groups(chunk.key_offsets)
        if spec.has_row_contexts:
            context = refs.context_buffer[chunk.rows.buffer_slot, chunk.rows.row_slice, :]
            columns = [x - context for x in columns]
        s += jnp.concatenate([slopes * x for x in columns], axis=1)
    cap = None
    if spec.soft_cap is not None:
        cap = spec.soft_cap * softmax_unit(spec)
    if chunk.bias_index is None:
        return s if cap is None else jnp.tanh(s) * cap
    rows = pl.ds(0, 1) if spec.tokens_per_tile == 1 else chunk.rows.row_slice
    bias = jnp.broadcast_to(refs.row_bias[chunk.bias_index, rows, : s.shape[1]], s.shape)
    s += bias
    # tanh(-inf) is -1, so pairs that a bias of -inf masks are masked again.
    return s if cap is None else jnp.where(bias == -jnp.inf, bias, jnp.tanh(s) * cap)


def _code_scores(query: jax.Array, chunk: HeadChunk, codes: CodeChunk, spec: PagedSpec) -> jax.Array:
    """Returns products of queries with coded keys, and with the signs of their residuals."""
    layout = spec.cache_layout.codes
    assert layout is not None  # the chunk has codes
    norms, residual_norms = codes.load_key_norms()
    s = _multiply(query[:, : layout.keys.count], chunk.load_keys(), (1, 0), spec.operand_dtype, spec) * norms
    if codes.load_signs is None:
        return s
    products = _multiply(query[:, layout.sign_column :], codes.load_signs(), (1, 0), spec.operand_dtype, spec)
    return s + products * residual_norms


def _multiply(a: jax.Array, b: jax.Array, contracted_axes: tuple[int, int], dtype: Any, spec: PagedSpec) -> jax.Array:
    """Returns the product of two matrices over one axis of each, in float32; for 16-bit operands it is exact in one
    pass.
    """
    return matrix_product(
        a, b, contracted_axes, spec.precision if jnp.dtype(dtype).itemsize == 4 else lax.Precision.DEFAULT
    )
