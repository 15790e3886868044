"""Forward pass of paged attention: online softmax over tiles of keys that are gathered from the pages they lie in.

For a stack of query tiles, each of one sequence, over the keys from the first to the last that any row attends
(Milakov & Gimelshein 2018):

    s   = masked scores of the tile, keys before rows: [n, h, k, r]
    m'  = max(m, max_k s)
    p   = exp(s - m')
    l   = exp(m - m') l + sum_k p
    o   = exp(m - m') o + p v

Nothing is gathered but these tiles, so memory does not depend on the lengths. The matrix products put the keys first
because XLA's CPU backend computes `k q` many times faster than `q k` where there are few query rows.

Shapes of a tile: n query tiles, h KV heads, k keys, t rows of a sequence times g query heads per KV head = r rows.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ejkernel.families.paged_attention import (
    PagedAttention,
    causal_window_bounds,
    in_same_chunk,
    qq_bias_of_pairs,
    round_to_compute_dtype,
    sequences_and_heads_in_call,
)
from ejkernel.families.paged_attention import pages as paged_cache
from ejkernel.families.paged_attention.rotation import rotate_back, rotate_queries
from ejkernel.families.paged_attention.work import WorkList, longest_first, make_work_list, take_batch
from ejkernel.families.tiled_attention import apply_soft_cap
from ejkernel.planning.precision import product_precision
from ejkernel_xla.paged_attention.config import PagedTiles, PagedTiling, tiles
from ejkernel_xla.rounded_products import rounded_product

_BATCH_DIMENSIONS = ((0, 1), (0, 1))


class OnlineSoftmax(NamedTuple):
    """Online softmax of a stack of query tiles: row_max and row_sum [n, h, r], acc [n, h, r, v]."""

    row_max: jax.Array
    row_sum: jax.Array
    acc: jax.Array


def forward(record: PagedAttention, config: PagedTiles) -> tuple[tuple[jax.Array, ...], None]:
    """Returns attention output of a record.

    Args:
        record: The canonical arguments.
        config: Tile sizes.

    Returns:
        Output [T, H, Dv] in the query's dtype, lse [T, H] and the pages that were written, if any; no residuals.
    """
    given = record
    record, pages = paged_cache.write_new_tokens(rotate_queries(record, by_row=config.batch_invariant))
    state = _initial_output_and_lse(record)
    if state[0].size and record.kv_lens.size and record.key_pages.size:
        state = _attend_all_key_tiles(record, tiles(record, config), state)
    output, lse = state
    return (rotate_back(given, output, by_row=config.batch_invariant), lse, *pages), None


def _attend_all_key_tiles(
    record: PagedAttention, cut: PagedTiling, state: tuple[jax.Array, ...]
) -> tuple[jax.Array, ...]:
    # Tiles of similar length share a stack. The loop of a stack runs as long as its longest tile, and shorter tiles are
    # masked.
    work = longest_first(make_work_list(record, cut.queries, cut.stack))

    def batch(step: jax.Array, state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        at = take_batch(work, step, cut.stack)
        query, rows = _load_queries(record, cut, at)

        def key_tile(tile: jax.Array, running: OnlineSoftmax) -> OnlineSoftmax:
            # Each tile of the stack counts from its first attended key, so a window costs what it covers.
            positions = at.low[:, None] + tile * cut.keys + jnp.arange(cut.keys, dtype=jnp.int32)
            keys, values, present = _load_keys(record, at, positions)
            scores = _scores(record, at, positions, query, keys)
            scores = jnp.where(_allowed_pairs(record, cut, at, positions, present), scores, -jnp.inf)
            return _online_softmax_step(running, scores.reshape(*scores.shape[:3], -1), values)

        # A traced bound: short sequences end early, and tables may be wider than what they hold.
        steps = (jnp.max(at.high - at.low) + cut.keys - 1) // cut.keys
        running = lax.fori_loop(jnp.int32(0), steps, key_tile, _initial_softmax(record, query))
        tile = _normalise_and_lse(record, running)
        return tuple(_store_tile(x, rows, part, cut) for x, part in zip(state, tile, strict=True))

    return lax.fori_loop(jnp.int32(0), (work.num_live + cut.stack - 1) // cut.stack, batch, state)


def accumulator(record: PagedAttention) -> Any:
    """Returns the dtype of scores, sums and products: float32, or float64 for float64 inputs."""
    return jnp.promote_types(record.query.dtype, jnp.float32)


def _initial_output_and_lse(record: PagedAttention) -> tuple[jax.Array, jax.Array]:
    """Returns output and lse of rows that belong to no sequence."""
    rows, heads, _ = record.query.shape
    output = jnp.zeros((rows, heads, paged_cache.value_head_dim(record)), record.query.dtype)
    return output, jnp.full((rows, heads), -jnp.inf, accumulator(record))


def _load_queries(record: PagedAttention, cut: PagedTiling, at: WorkList) -> tuple[jax.Array, jax.Array]:
    """Returns query rows [n, h, r, d] of a stack, and which of the record's rows they are, [n, t]; T for none."""
    row_sum, heads, size = record.query.shape
    offset = jnp.arange(cut.queries, dtype=jnp.int32)
    rows = jnp.where(offset < at.rows[:, None], at.row[:, None] + offset, row_sum)
    kv_heads = paged_cache.kv_heads(record)
    # Rows that a tile does not have are T, after the array: read as 0 here, dropped in `_store_tile`.
    query = round_to_compute_dtype(record.query.at[rows].get(mode="fill", fill_value=0), record)
    query = query.astype(_operand_dtype(record, record.key_pages)).reshape(
        cut.stack, cut.queries, kv_heads, heads // kv_heads, size
    )
    return query.swapaxes(1, 2).reshape(cut.stack, kv_heads, -1, size), rows


def _load_keys(record: PagedAttention, at: WorkList, positions: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns keys [n, h, k, d], values [n, h, k, v] and presence bool [n, k] at positions [n, k]; 0
    where not present.
    """
    in_range = positions < at.high[:, None]
    # Positions after `high` have no page, and `load` gives 0 for them: no NaN of a free page meets a weight of 0.
    page, slot = paged_cache.find_pages_and_slots(record, at.sequence[:, None], jnp.where(in_range, positions, -1))
    head = jnp.arange(paged_cache.kv_heads(record), dtype=jnp.int32)[:, None]
    keys, values = (
        round_to_compute_dtype(x, record)
        for x in paged_cache.load_keys_and_values(record, page[:, None], slot[:, None], head)
    )
    stored = record.key_pages if record.value_pages is None else record.value_pages
    values = values.astype(_wider_dtype(record.query.dtype, stored.dtype))
    return keys.astype(_operand_dtype(record, record.key_pages)), values, page < paged_cache.page_count(record)


def _operand_dtype(record: PagedAttention, pages: jax.Array) -> Any:
    """Returns the operands' dtype of the product of queries and keys."""
    return record.compute_dtype or _wider_dtype(record.query.dtype, pages.dtype)


def _wider_dtype(query: Any, stored_dtype: Any) -> Any:
    """Returns the wider of two dtypes; caches of 8 bits are read in the query's."""
    return query if jnp.dtype(stored_dtype).itemsize == 1 else jnp.promote_types(query, stored_dtype)


def _scores(record: PagedAttention, at: WorkList, positions: jax.Array, query: jax.Array, keys: jax.Array) -> jax.Array:
    """Returns scores before masking, [n, h, k, t, g]."""
    contract = (((3,), (3,)), _BATCH_DIMENSIONS)
    dtype = accumulator(record)
    scores = lax.dot_general(keys, query, contract, product_precision(keys.dtype), preferred_element_type=dtype)
    # On the float32 scores: 16-bit queries keep their digits.
    scores = scores * record.softmax_scale
    heads, group = keys.shape[1], record.query.shape[1] // keys.shape[1]
    scores = scores.reshape(*scores.shape[:3], -1, group)
    column = positions - at.context_length[:, None]
    if record.alibi_slopes is not None:
        slopes = record.alibi_slopes.astype(scores.dtype).reshape(heads, 1, 1, group)
        scores = scores + rounded_product(slopes, column[:, None, :, None, None].astype(scores.dtype))
    row = (at.position - at.context_length)[:, None, None] + jnp.arange(scores.shape[3], dtype=jnp.int32)
    rows_of = paged_cache.query_ranges(record)[1]
    terms = qq_bias_of_pairs(record, rows_of, at.sequence[:, None, None], row, column[:, :, None])
    if terms is not None:
        scores = scores + terms.astype(scores.dtype)[:, None, :, :, None]
    if record.logits_soft_cap is not None:
        scores = apply_soft_cap(scores, record.logits_soft_cap)
    if record.score_mod is not None:
        indices = _indices_of_pairs(record, at, positions, scores.shape)
        scores = record.score_mod.of_pairs(scores, *indices).astype(scores.dtype)
    return scores


def _indices_of_pairs(
    record: PagedAttention, at: WorkList, positions: jax.Array, shape: tuple[int, ...]
) -> tuple[jax.Array, ...]:
    """Returns what functions of pairs read: sequences [n, 1, 1, 1, 1], heads [1, h, 1, 1, g], positions of queries
    [n, 1, 1, t, 1] and of keys [n, 1, k, 1, 1].

    Args:
        record: The canonical arguments.
        at: The tiles of the stack.
        positions: Those of the keys, int32 [n, k].
        shape: n, h, k, t and g.
    """
    sequence, head = sequences_and_heads_in_call(record, at.sequence)
    query = at.position[:, None] + jnp.arange(shape[3], dtype=jnp.int32)
    return (
        sequence[:, None, None, None, None],
        head.reshape(1, shape[1], 1, 1, shape[4]),
        query[:, None, None, :, None],
        positions[:, None, :, None, None],
    )


def _allowed_pairs(
    record: PagedAttention, cut: PagedTiling, at: WorkList, positions: jax.Array, present: jax.Array
) -> jax.Array:
    """Returns what the masks allow, bool broadcastable to [n, h, k, t, g]."""
    allowed = present[:, None, :, None, None]
    if record.mask_mod is not None:
        heads = paged_cache.kv_heads(record)
        shape = (*present.shape[:1], heads, present.shape[1], cut.queries, record.query.shape[1] // heads)
        allowed = allowed & record.mask_mod.of_pairs(*_indices_of_pairs(record, at, positions, shape))
    if cut.queries == 1:  # the keys from `low` to `high` are then exactly the row's
        return allowed
    left, right = causal_window_bounds(record)
    row = (at.position[:, None] + jnp.arange(cut.queries, dtype=jnp.int32))[:, None, None, :, None]
    key = positions[:, None, :, None, None]
    chunk = in_same_chunk(record, row, key)
    allowed = allowed if chunk is None else allowed & chunk
    if left is not None:
        allowed = allowed & (key >= row - left)
    return allowed if right is None else allowed & (key <= row + right)


def _initial_softmax(record: PagedAttention, query: jax.Array) -> OnlineSoftmax:
    shape, dtype = query.shape[:3], accumulator(record)
    acc = jnp.zeros((*shape, paged_cache.value_head_dim(record)), dtype)
    return OnlineSoftmax(jnp.full(shape, -jnp.inf, dtype), jnp.zeros(shape, dtype), acc)


def _online_softmax_step(running: OnlineSoftmax, scores: jax.Array, values: jax.Array) -> OnlineSoftmax:
    """Returns one step of the online softmax, over a tile of keys: rescales by alpha and adds the tile."""
    row_max = jnp.maximum(running.row_max, jnp.max(scores, axis=2))
    shift = jnp.where(row_max == -jnp.inf, 0, row_max)  # exp(-inf - 0) = 0 where nothing was seen yet
    weights, alpha = jnp.exp(scores - shift[:, :, None]), jnp.exp(running.row_max - shift)
    row_sum = alpha * running.row_sum + jnp.sum(weights, axis=2)
    contract = (((2,), (2,)), _BATCH_DIMENSIONS)
    weights = weights.astype(values.dtype)
    step = lax.dot_general(
        weights, values, contract, product_precision(values.dtype), preferred_element_type=scores.dtype
    )
    return OnlineSoftmax(row_max, row_sum, alpha[..., None] * running.acc + step)


def _normalise_and_lse(record: PagedAttention, running: OnlineSoftmax) -> tuple[jax.Array, jax.Array]:
    """Returns the epilogue: output [n, h, r, v] and lse [n, h, r]. The denominator gets the sink here, once."""
    row_max, row_sum = running.row_max, running.row_sum
    sink = jnp.array(-jnp.inf, row_max.dtype)
    if record.softmax_aux is not None:
        group = record.query.shape[1] // row_max.shape[1]
        sink = jnp.tile(record.softmax_aux.astype(row_max.dtype).reshape(-1, group), row_max.shape[2] // group)
    max_with_sink = jnp.maximum(row_max, sink)
    shift = jnp.where(max_with_sink == -jnp.inf, 0, max_with_sink)
    row_sum = row_sum * jnp.exp(row_max - shift) + jnp.exp(sink - shift)
    attends = row_sum > 0
    lse = jnp.where(attends, jnp.log(jnp.where(attends, row_sum, 1)) + shift, -jnp.inf)
    # One factor a row: the scale of quantised values, the sink's share and the normalisation.
    factor = record.value_scale * jnp.exp(row_max - shift) / jnp.where(attends, row_sum, 1)
    return running.acc * factor[..., None], lse


def _store_tile(x: jax.Array, rows: jax.Array, tile: jax.Array, cut: PagedTiling) -> jax.Array:
    """Returns x [T, H, ...] with rows [n, t] replaced by a tile [n, h, r, ...]."""
    stack, heads, _, *rest = tile.shape
    tile = tile.reshape(stack, heads, cut.queries, -1, *rest).swapaxes(1, 2)
    return x.at[rows].set(tile.reshape(stack, cut.queries, -1, *rest).astype(x.dtype), mode="drop")
