"""Defines the argument record of paged softmax attention, and functions of the record alone."""

from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.planning.precision import rounded
from ejkernel.types.arguments import arguments, arrays_of_function, static
from ejkernel.types.integers import clamp_to_int32, fits_int32
from ejkernel.types.pair_functions import PairFunction

Window = tuple[int | None, int | None]


@arguments
class PagedAttention:
    """Canonical input of one call. T query rows, N sequences, P pages of S slots, H and Hk heads, D and Dv sizes.

    Attributes:
        query: [T, H, D] floating.
        key_pages: The cache's keys, axes in the order of `kv_layout`; with `"pshcd"` [P, S, G, 2, L], keys (0) and
            values (1) of G >= Hk heads in the first D of L lanes; with `"psd"` [P, S, L], latent vectors. With
            `code_bits` uint8 [P, S, Hk, bytes], the codes of keys in `"pshd"`, and so with values.
        value_pages: The cache's values, [..., Dv]; None with `"pshcd"` and `"psd"`.
        block_tables: [N, pages per sequence] int; None for one page per sequence, its own.
        kv_lens: [N] int, tokens of each sequence, its queries included.
        query_start: [N + 1] int, first query row of each sequence; None for one row each.
        softmax_scale: Factor on the raw scores.
        kv_layout: One of `paged_cache.LAYOUTS`.
        kv_heads: Hk, where the cache has more heads, as padding.
        kv_starts: [N] int, first key of each sequence; None for 0.
        num_seqs: int, how many of the N sequences are live: a scalar, or the last entry of an array, which is not
            sliced, since that would be a launch of its own in front of a kernel; None for all.
        softmax_aux: [H] float32, one sink logit a head.
        alibi_slopes: [H] float32.
        qq_bias: Floating, for pairs of new tokens; pairs outside of a table have none. [Q, Q] is one table for all
            sequences, [N, Q, Q] one for each, and [L] has the q_n * q_n entries of each sequence's own one after the
            other, in row-major order.
        score_mod: `(score, n, h, p, k) -> score`, applied to the soft-capped scores: n is the sequence, h the query
            head, p and k the positions of query and key in the sequence, whatever the pages.
        mask_mod: `(n, h, p, k) -> bool`, True attends; the same indices.
        index_origin: [2] int32, sequence and head of a shard's first ones, which the functions count from; None is 0.
        new_keys: [T, Hk, D] tokens of the query rows, to be written first.
        new_values: [T, Hk, Dv], as above; None where the cache is latent, and `new_keys` [T, 1, D] has them.
        causal: Key position at most query position.
        sliding_window: (left, right), inclusive; None on a side leaves it open.
        chunk_size: Keys and queries attend within the same run of so many positions alone; None for no such runs.
        logits_soft_cap: Cap c of `c * tanh(s / c)`.
        compute_dtype: Queries, keys and values are rounded to it; None for no rounding.
        value_scale: Factor on the output.
        latent: (R, start) of a cache of latent vectors, with `"psd"` alone; Dv is R.
        code_bits: Bits of a code of keys, and of values, in a cache of TurboQuant's codes
            (`ejkernel.planning.turboquant`); None for a cache of numbers. A key then has Q more columns, of its signs.
        key_signs: uint8 [P, S, Hk, Q / 8], signs of the keys' residuals; None without codes, and for Q = 0.
        key_norms: [P, S, Hk, 2] floating, norms of the keys and of their residuals.
        value_norms: [P, S, Hk] floating.
        key_codebook: [levels] floating, what the codes of keys stand for.
        value_codebook: [levels] floating.
        rotation: [D, D] floating, of a cache of codes: of queries before the products, and of the output back
            (`rotation.rotate_queries`, `rotation.rotate_back`). None where both are in the cache's coordinates, and
            queries have the D + Q columns of keys.
        projection: [Q, D] floating, of rotated queries, for products with signs; None for Q = 0.
        new_key_signs: uint8 [T, Hk, Q / 8] of `new_keys`, which are codes too.
        new_key_norms: [T, Hk, 2].
        new_value_norms: [T, Hk].
        shared_prefix: int scalar, tokens that all sequences begin with: they lie in the pages of sequence 0, whatever
            the other tables say, and after them all queries. A kernel may read these pages once for the batch.
    """

    query: jax.Array
    key_pages: jax.Array
    value_pages: jax.Array | None
    block_tables: jax.Array | None
    kv_lens: jax.Array
    query_start: jax.Array | None
    softmax_scale: float = static()
    kv_layout: str = static()
    kv_heads: int | None = static()
    kv_starts: jax.Array | None = None
    num_seqs: jax.Array | None = None
    softmax_aux: jax.Array | None = None
    alibi_slopes: jax.Array | None = None
    qq_bias: jax.Array | None = None
    score_mod: PairFunction | None = arrays_of_function(default=None)
    mask_mod: PairFunction | None = arrays_of_function(default=None)
    index_origin: jax.Array | None = None
    new_keys: jax.Array | None = None
    new_values: jax.Array | None = None
    causal: bool = static(default=True)
    sliding_window: Window | None = static(default=None)
    logits_soft_cap: float | None = static(default=None)
    compute_dtype: Any = static(default=None)
    value_scale: float = static(default=1.0)
    latent: tuple[int, int] | None = static(default=None)
    shared_prefix: jax.Array | None = None
    chunk_size: int | None = static(default=None)
    code_bits: tuple[int, int] | None = static(default=None)
    key_signs: jax.Array | None = None
    key_norms: jax.Array | None = None
    value_norms: jax.Array | None = None
    key_codebook: jax.Array | None = None
    value_codebook: jax.Array | None = None
    new_key_signs: jax.Array | None = None
    new_key_norms: jax.Array | None = None
    new_value_norms: jax.Array | None = None
    rotation: jax.Array | None = None
    projection: jax.Array | None = None

    def __post_init__(self) -> None:
        _pad_empty_tables(self)
        for name in ("block_tables", "kv_lens", "query_start", "kv_starts", "num_seqs", "shared_prefix"):
            values = getattr(self, name)
            if hasattr(values, "dtype") and not fits_int32(
                values.dtype
            ):  # a cast would turn invalid entries into page numbers
                object.__setattr__(self, name, clamp_to_int32(values))


def _pad_empty_tables(record: PagedAttention) -> None:
    """Gives tables without entries one that is no page, and a call without sequences one that has no tokens."""
    tables, lengths, starts = record.block_tables, record.kv_lens, record.query_start
    shape = getattr(tables, "shape", ())
    if len(shape) != 2 or all(not isinstance(size, int) or size for size in shape):
        return
    assert tables is not None  # it has a shape
    missing = [max(0, 1 - size) if isinstance(size, int) else 0 for size in shape]
    changes: dict[str, Any] = {
        "block_tables": jnp.pad(tables, [(0, count) for count in missing], constant_values=-1),
        "kv_lens": jnp.pad(lengths, (0, missing[0])),
    }
    if starts is not None:
        changes["query_start"] = jnp.pad(starts, (0, missing[0]), mode="edge")
    for name, value in changes.items():
        object.__setattr__(record, name, value)


def causal_window_bounds(record: PagedAttention) -> Window:
    """Returns (left, right) such that causal and window together allow `-left <= k - p <= right`; None is unbounded."""
    left, right = record.sliding_window or (None, None)
    if record.causal:
        right = 0 if right is None else min(right, 0)
    return left, right


def sequences_and_heads_in_call(record: PagedAttention, sequence: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the indices in the whole call of sequences of a record, in the shape of `sequence`, and of its query
    heads, [H], which functions of pairs read.
    """
    head = jnp.arange(record.query.shape[1], dtype=jnp.int32)
    if record.index_origin is None:
        return sequence.astype(jnp.int32), head
    origin = record.index_origin.astype(jnp.int32)
    return sequence.astype(jnp.int32) + origin[0], head + origin[1]


def qq_bias_of_pairs(
    record: PagedAttention,
    rows_per_sequence: jax.Array,
    sequence: jax.Array,
    query_index: jax.Array,
    key_index: jax.Array,
) -> jax.Array | None:
    """Returns what a record adds for pairs of new tokens; None for nothing. The indices broadcast against each other.

    Args:
        record: The record.
        rows_per_sequence: [N] int, query rows of each sequence.
        sequence: The sequence of each pair, >= 0.
        query_index: The query's index among its sequence's queries.
        key_index: The key's index among them; a negative one is of a token before them.
    """
    bias = record.qq_bias
    if bias is None:
        return None
    size = rows_per_sequence[sequence] if bias.ndim == 1 else jnp.int32(bias.shape[-1])
    outside = (query_index < 0) | (query_index >= size) | (key_index < 0) | (key_index >= size)
    start = qq_bias_starts(record, rows_per_sequence)
    if bias.ndim == 1:
        index = (jnp.int32(0) if start is None else start[sequence]) + query_index * size + key_index
        return bias.at[jnp.where(outside, bias.size, index)].get(mode="fill", fill_value=0)
    query_index = jnp.where(outside, size, query_index)  # an index for each axis: a flat one would overflow int32
    at = (query_index, key_index) if bias.ndim == 2 else (sequence, query_index, key_index)
    return bias.at[at].get(mode="fill", fill_value=0)


def qq_bias_starts(record: PagedAttention, rows_per_sequence: jax.Array) -> jax.Array | None:
    """Returns where each sequence's table of `qq_bias` starts, [N] int32; None if all share one.

    Args:
        record: The record.
        rows_per_sequence: [N] int, query rows of each sequence.
    """
    bias = record.qq_bias
    if bias is None or bias.ndim == 2:
        return None
    sizes = (
        rows_per_sequence * rows_per_sequence
        if bias.ndim == 1
        else jnp.full_like(rows_per_sequence, bias.shape[-1] ** 2)
    )
    return jnp.cumsum(sizes, dtype=jnp.int32) - sizes


def in_same_chunk(record: PagedAttention, position: jax.Array, key: jax.Array) -> jax.Array | None:
    """Returns whether queries and keys at these positions are of one chunk; None where there are no chunks."""
    size = record.chunk_size
    return None if size is None else position // size == key // size


def round_to_compute_dtype(x: jax.Array, record: PagedAttention) -> jax.Array:
    """Returns queries, keys or values rounded to `compute_dtype`, in their own dtype."""
    return x if record.compute_dtype is None else rounded(x, record.compute_dtype)
