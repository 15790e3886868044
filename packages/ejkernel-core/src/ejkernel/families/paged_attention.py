"""The paged softmax attention family: attention over a key-value cache that lies in pages, for inference.

Sequence n has `kv_lens[n]` tokens, of which the newest, `q_n`, are its queries: query i sits at position
`p_i = kv_lens[n] - q_n + i`, and `c_n = kv_lens[n] - q_n` tokens were there before. For its key at position k, query
head h and KV head `h // (H // Hk)`:

    s_ik = softmax_scale * <q_i, k_k>                                float32 accumulation
    s_ik = s_ik + alibi_slopes_h * (k - c_n) + qq_bias[i, k - c_n]   the latter for keys that are queries, k >= c_n
    s_ik = cap * tanh(s_ik / cap)                                    if logits_soft_cap; -inf stays -inf, and masks
    s_ik = -inf                                                      unless allowed(i, k)
    p_ik = exp(s_ik) / (exp(softmax_aux_h) + sum_k exp(s_ik))        the sink joins the denominator only
    o_i  = value_scale * sum_k p_ik * v_k

`allowed(i, k)`: the cache has the key, `kv_starts[n] <= k < kv_lens[n]`, `k <= p_i` if causal, and
`p_i - left <= k <= p_i + right` for the window. A row with nothing to attend gives output 0 and lse -inf (the sink's
logit if there is one); a row that belongs to no sequence gives 0 and -inf.

In a latent cache, `latent = (R, start)`, a token has one row that all query heads share (DeepSeek-V2, 2024,
arXiv:2405.04434): the first R columns are its value, and they and the D - R columns from `start` on are its key.

If there are new tokens, they are written into the pages first (`paged_cache.write`), and attended to.

Sources: Kwon et al. 2023, arXiv:2309.06180 (paged attention); Milakov & Gimelshein 2018 (online softmax); Press et al.
2022, arXiv:2108.12409 (alibi); Xiao et al. 2023, arXiv:2309.17453 (sinks).
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ejkernel.families.tiled_attention import soft_capped
from ejkernel.ops.arguments import arguments, static
from ejkernel.ops.model import Family
from ejkernel.planning import paged_cache
from ejkernel.planning.precision import rounded
from ejkernel.planning.requests import PADDING, UNUSED, claimed
from ejkernel.types.integers import as_int32, fits_int32

Window = tuple[int | None, int | None]


@arguments
class PagedAttention:
    """Canonical input of one call. T query rows, N sequences, P pages of S slots, H and Hk heads, D and Dv sizes.

    Attributes:
        query: [T, H, D] floating.
        key_pages: The cache's keys, axes in the order of `kv_layout`; with `"pshcd"` [P, S, G, 2, L], keys (0) and
            values (1) of G >= Hk heads in the first D of L lanes; with `"psd"` [P, S, L], latent vectors.
        value_pages: The cache's values, [..., Dv]; None with `"pshcd"` and `"psd"`.
        block_tables: [N, pages a sequence] int; None for one page a sequence, its own.
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
        qq_bias: [Q, Q] floating; pairs outside have none.
        new_keys: [T, Hk, D] tokens of the query rows, to be written first.
        new_values: [T, Hk, Dv], likewise; None where the cache is latent, and `new_keys` [T, 1, D] has them.
        causal: Key position at most query position.
        sliding_window: (left, right), inclusive; None on a side leaves it open.
        logits_soft_cap: Cap c of `c * tanh(s / c)`.
        compute_dtype: Queries, keys and values are rounded to it; None for no rounding.
        value_scale: Factor on the output.
        latent: (R, start) of a cache of latent vectors, with `"psd"` alone; Dv is R.
        shared_prefix: int scalar, tokens that all sequences begin with: they lie in the pages of sequence 0, whatever
            the other tables say, and behind them all queries.
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
    new_keys: jax.Array | None = None
    new_values: jax.Array | None = None
    causal: bool = static(default=True)
    sliding_window: Window | None = static(default=None)
    logits_soft_cap: float | None = static(default=None)
    compute_dtype: Any = static(default=None)
    value_scale: float = static(default=1.0)
    latent: tuple[int, int] | None = static(default=None)
    shared_prefix: jax.Array | None = None

    def __post_init__(self) -> None:
        _without_empty_tables(self)
        for name in ("block_tables", "kv_lens", "query_start", "kv_starts", "num_seqs", "shared_prefix"):
            values = getattr(self, name)
            if hasattr(values, "dtype") and not fits_int32(values.dtype):  # a cast would make pages of what are none
                object.__setattr__(self, name, as_int32(values))


def _without_empty_tables(record: PagedAttention) -> None:
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


def band(record: PagedAttention) -> Window:
    """(left, right) such that causal and window together allow `-left <= k - p <= right`; None is unbounded."""
    left, right = record.sliding_window or (None, None)
    if record.causal:
        right = 0 if right is None else min(right, 0)
    return left, right


def reference(record: PagedAttention) -> tuple[tuple[jax.Array, ...], None]:
    """The family's meaning in plain jnp, every query row against every slot of its table.

    Returns:
        Output [T, H, Dv], lse [T, H] and the pages that were written, if any; and no residuals.
    """
    accumulate = jnp.promote_types(record.query.dtype, jnp.float32)
    record, pages = paged_cache.write(record)
    sequence, position = paged_cache.token_places(record)
    keys, values, present = _gathered(record, sequence, accumulate)
    scores = _scores(record, keys, sequence, position, accumulate)
    allowed = (present & _in_band(record, position))[:, None]
    sink = jnp.full(record.query.shape[1], -jnp.inf) if record.softmax_aux is None else record.softmax_aux
    sink = jnp.where((sequence >= 0)[:, None], sink.astype(accumulate), -jnp.inf)[..., None]
    row_max = jnp.maximum(jnp.max(scores, axis=-1, keepdims=True, where=allowed, initial=-jnp.inf), sink)
    shift = jnp.where(row_max > -jnp.inf, row_max, 0)
    weights = jnp.where(allowed, jnp.exp(jnp.where(allowed, scores - shift, 0)), 0)
    total = jnp.sum(weights, axis=-1, keepdims=True) + jnp.exp(sink - shift)
    weights = weights / jnp.where(total > 0, total, 1)
    lse = jnp.where(total > 0, jnp.log(jnp.where(total > 0, total, 1)) + shift, -jnp.inf)[..., 0]
    output = jnp.einsum("thk,tkhv->thv", weights, values, precision=lax.Precision.HIGHEST) * record.value_scale
    return (output.astype(record.query.dtype), lse, *pages), None


def _gathered(record: PagedAttention, sequence: jax.Array, dtype: Any) -> tuple[jax.Array, ...]:
    """For every query row the keys [T, K, H, D], values and presence bool [T, K] of its table's K slots."""
    heads, kv_heads = record.query.shape[1], paged_cache.kv_heads(record)
    position = jnp.arange(paged_cache.capacity(record), dtype=jnp.int32)
    page, slot = paged_cache.find(record, sequence[:, None], position[None])
    row = jnp.maximum(sequence, 0)
    present = (page < paged_cache.page_count(record)) & (position < record.kv_lens[row][:, None])
    if record.kv_starts is not None:
        present &= position >= record.kv_starts[row][:, None]
    page = jnp.where(present, page, paged_cache.page_count(record))
    head = jnp.arange(heads, dtype=jnp.int32) // (heads // kv_heads)
    keys, values = paged_cache.load(record, page[..., None], slot[..., None], head)
    return as_computed(keys, record).astype(dtype), as_computed(values, record).astype(dtype), present


def _scores(record: PagedAttention, keys: jax.Array, sequence: jax.Array, position: jax.Array, dtype: Any) -> jax.Array:
    """Scores before masking, [T, H, K]."""
    query = as_computed(record.query, record).astype(dtype)
    scores = jnp.einsum("thd,tkhd->thk", query, keys, precision=lax.Precision.HIGHEST) * record.softmax_scale
    context = _contexts(record)[jnp.maximum(sequence, 0)]
    column = jnp.arange(scores.shape[-1], dtype=jnp.int32) - context[:, None]
    if record.alibi_slopes is not None:
        scores = scores + record.alibi_slopes.astype(dtype)[:, None] * column[:, None].astype(dtype)
    if record.qq_bias is not None:
        scores = scores + qq_terms(record.qq_bias, (position - context)[:, None], column)[:, None].astype(dtype)
    if record.logits_soft_cap is not None:
        scores = soft_capped(scores, record.logits_soft_cap)
    return scores


def _contexts(record: PagedAttention) -> jax.Array:
    """Tokens of each sequence before its queries."""
    return record.kv_lens.astype(jnp.int32) - paged_cache.query_ranges(record)[1]


def qq_terms(bias: jax.Array, row: jax.Array, column: jax.Array) -> jax.Array:
    """Entries of a [Q, Q] bias; 0 outside of it. The indices broadcast against each other."""
    size = bias.shape[0]
    outside = (row < 0) | (row >= size) | (column < 0) | (column >= size)
    return bias.at[jnp.where(outside, size, row), column].get(mode="fill", fill_value=0)


def _in_band(record: PagedAttention, position: jax.Array) -> jax.Array:
    """bool [T, K]."""
    left, right = band(record)
    key, position = jnp.arange(paged_cache.capacity(record), dtype=jnp.int32), position[:, None]
    allowed = jnp.ones((position.shape[0], key.shape[0]), bool)
    if left is not None:
        allowed &= key >= position - left
    return allowed if right is None else allowed & (key <= position + right)


def as_computed(x: jax.Array, record: PagedAttention) -> jax.Array:
    """Queries, keys or values rounded to `compute_dtype`, in their own dtype."""
    return x if record.compute_dtype is None else rounded(x, record.compute_dtype)


def localise(record: PagedAttention, offsets: Mapping[str, jax.Array]) -> PagedAttention:
    """One shard's record: heads are independent, and so are sequences; nothing in it is global.

    Raises:
        ValueError: The cache has heads that only pad it, which cannot be told from the others in a part of them.
    """
    if ("g" in offsets or "h" in offsets) and record.kv_heads is not None:
        raise ValueError(f"in_specs: a cache with padded heads cannot be split by its {record.kv_heads} KV heads")
    return record


def axes(record: PagedAttention) -> dict[str, Any]:
    """Axis letters of a record's fields and of its outputs: the cache's follow from its layout.

    r counts sequences; without `query_start` they have a query row each. Without `block_tables` each has its own page.
    """
    rows = "r" if record.query_start is None else "t"
    pages = record.kv_layout.replace("h", "g")
    pages = " ".join(pages if record.block_tables is not None else pages.replace("p", "r"))
    values = pages.replace("d", "v")
    written = () if record.new_keys is None else (pages,) if record.value_pages is None else (pages, values)
    return {
        "query": f"{rows} h d",
        "key_pages": pages,
        "value_pages": values,
        "block_tables": "r k",
        "kv_lens": "r",
        "query_start": "n",
        "kv_starts": "r",
        "num_seqs": "counts" if record.num_seqs is not None and record.num_seqs.ndim else "",
        "shared_prefix": "",
        "softmax_aux": "h",
        "alibi_slopes": "h",
        "qq_bias": "i j",
        "new_keys": "t g d",
        "new_values": "t g v",
        "output": (f"{rows} h v", f"{rows} h", *written),
    }


def requests(record: PagedAttention) -> tuple[dict[str, Any], ...]:
    """The owners of a record's entries: the sequences, with the slots of the cache that hold their tokens."""
    sequences, tokens = np.arange(record.kv_lens.shape[0]), np.asarray(paged_cache.token_places(record)[0])
    live = paged_cache.live_sequences(record)
    lens, starts = np.asarray(record.kv_lens), np.zeros_like(sequences)
    if record.kv_starts is not None:
        starts = np.asarray(record.kv_starts)
    pages = np.full((paged_cache.page_count(record), paged_cache.page_size(record)), UNUSED)
    for n in sequences if live is None else sequences[: int(live)]:
        position = np.arange(starts[n], min(lens[n], paged_cache.capacity(record)), dtype=np.int32)
        page, slot = (np.asarray(x) for x in paged_cache.find(record, jnp.int32(n), jnp.asarray(position)))
        there = page < pages.shape[0]
        claimed(pages, (page[there], slot[there]), n)
    places = "r s" if record.block_tables is None else "p s"
    return (
        {
            "t": tokens,
            "r": sequences if live is None else np.where(sequences < int(live), sequences, PADDING),
            places: pages,
        },
    )


FAMILY = Family(
    name="paged_attention",
    record=PagedAttention,
    differentiable=(),
    dtype=lambda record: record.query.dtype,
    head_dims=lambda record: (record.query.shape[-1], paged_cache.value_size(record)),
    axes=axes,
    shardable=lambda record: "rhg" if record.query_start is None else "hg",
    aligned=(("h", "g"),),
    localise=localise,
    reference=reference,
    requests=requests,
)
