"""Conversions from and to cumulative sequence lengths.

The vector is always the usual one: N sequences are described by N + 1 increasing integers that start with 0, and
sequence i has `cu[i + 1] - cu[i]` tokens, possibly none. The functions on masks describe padded rows (sequence i is row
i, its tokens at the front); those on segment ids describe packed rows (all sequences one after the other in one row).
"""

from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike, DTypeLike

from ejkernel.types.checks import as_int32_array, check_choice, check_rank, check_static_size
from ejkernel.types.debug import check_cu_seqlens_values, check_left_aligned
from ejkernel.types.segments import as_bool_mask

# From [batch, heads, q_len, kv_len] to [batch, q_len, kv_len].
_HEAD_REDUCTIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "any": lambda mask: mask.any(axis=1),
    "all": lambda mask: mask.all(axis=1),
    "first": lambda mask: mask[:, 0],
}


def as_cu_seqlens(name: str, value: Any, max_len: int | None = None) -> jax.Array:
    """Returns `value` as int32 [sequences + 1]; raises ValueError if it is no such vector."""
    check_cu_seqlens_values(name, value, max_len)
    cu_seqlens = as_int32_array(name, value)
    if cu_seqlens.ndim != 1 or cu_seqlens.shape[0] == 0:
        raise ValueError(f"{name}: got shape {cu_seqlens.shape}, wants [sequences + 1]")
    return cu_seqlens


def lengths_to_cu_seqlens(lengths: jax.Array, dtype: DTypeLike = jnp.int32) -> jax.Array:
    """Returns [N + 1] cumulative sums of the [N] lengths, with 0 in front."""
    return jnp.concatenate([jnp.zeros(1, dtype), jnp.cumsum(lengths, dtype=dtype)])


def cu_seqlens_to_segment_ids(cu_seqlens: ArrayLike, length: int) -> jax.Array:
    """Numbers the tokens of a packed row by sequence.

    Args:
        cu_seqlens: [sequences + 1] integers, may be traced.
        length: Static length of the row.

    Returns:
        [1, length] int32: the sequence a token belongs to, -1 after the last one.

    Raises:
        ValueError: `cu_seqlens` is not such a vector or `length` is not a static size.
    """
    length = check_static_size("length", length)
    cu = as_cu_seqlens("cu_seqlens", cu_seqlens, length)
    token = jnp.arange(length, dtype=jnp.int32)
    # Counting the starts up to a token skips empty sequences by itself.
    sequence = jnp.searchsorted(cu, token, side="right").astype(jnp.int32) - 1
    return jnp.where(token < cu[-1], sequence, -1)[None]


def segment_ids_to_cu_seqlens(
    segment_ids: ArrayLike, *, max_segments: int = 128, dtype: DTypeLike = jnp.int32
) -> jax.Array:
    """Counts the tokens of every segment id.

    Args:
        segment_ids: Integers of any shape. Equal ids are counted together wherever they are, so the result describes a
            packed layout only if the ids are those of one packed row.
        max_segments: Static number of ids counted, from 0; higher ids are left out.
        dtype: Of the result.

    Returns:
        [max_segments + 1]; id i has `cu[i + 1] - cu[i]` tokens, so an id that is not used is an empty sequence.

    Raises:
        ValueError: `max_segments` is not a static size.
    """
    max_segments = check_static_size("max_segments", max_segments)
    ids = as_int32_array("segment_ids", segment_ids).reshape(-1)
    # Negative indices would count from the end, so padding is sent past it, where it is dropped.
    counts = jnp.zeros(max_segments, dtype).at[jnp.where(ids < 0, max_segments, ids)].add(1, mode="drop")
    return lengths_to_cu_seqlens(counts, dtype)


def qkv_masks_to_cu_seqlens(
    q_mask: ArrayLike, kv_mask: ArrayLike | None = None, *, out_dtype: DTypeLike = jnp.int32
) -> tuple[jax.Array, jax.Array]:
    """Turns the validity of padded rows into cumulative lengths.

    Args:
        q_mask: [batch, q_len], every value but 0 is a valid token; valid tokens stand at the front of their row.
        kv_mask: [batch, kv_len], default `q_mask`.
        out_dtype: Of the results.

    Returns:
        Two vectors [batch + 1].

    Raises:
        ValueError: A mask is not 2-D, or (if its values are readable) has padding before a valid token.
    """
    lengths = []
    for name, mask in (("q_mask", q_mask), ("kv_mask", q_mask if kv_mask is None else kv_mask)):
        check_left_aligned(name, mask)
        valid = as_bool_mask(mask)
        check_rank(name, valid.shape, {2: "[batch, length]"})
        lengths.append(valid.sum(axis=-1))
    return lengths_to_cu_seqlens(lengths[0], out_dtype), lengths_to_cu_seqlens(lengths[1], out_dtype)


def cu_seqlens_to_mask(cu_seqlens: ArrayLike, max_len: int, dtype: DTypeLike = jnp.bool_) -> jax.Array:
    """Turns cumulative lengths into the validity of padded rows.

    Args:
        cu_seqlens: [sequences + 1] integers, may be traced.
        max_len: Static length of a row; a longer sequence is cut.
        dtype: Of the result; True becomes 1.

    Returns:
        [sequences, max_len], True for the first `cu[i + 1] - cu[i]` tokens of row i.

    Raises:
        ValueError: `cu_seqlens` is not such a vector or `max_len` is not a static size.
    """
    return _row_validity(("cu_seqlens", cu_seqlens), ("max_len", max_len)).astype(dtype)


def _row_validity(cu_seqlens: tuple[str, Any], max_len: tuple[str, Any]) -> jax.Array:
    """Returns what `cu_seqlens_to_mask` returns, as bool, with the caller's argument names in errors."""
    lengths = jnp.diff(as_cu_seqlens(*cu_seqlens))
    return jnp.arange(check_static_size(*max_len)) < lengths[:, None]


def qkv_cu_seqlens_to_qkv_masks(
    cu_seqlens_q: ArrayLike,
    *,
    max_q_len: int,
    cu_seqlens_kv: ArrayLike | None = None,
    max_kv_len: int | None = None,
    dtype: DTypeLike = jnp.bool_,
) -> tuple[jax.Array, jax.Array]:
    """Returns the validity [sequences, max_q_len] of the queries and [sequences, max_kv_len] of the keys.

    See `cu_seqlens_to_mask`; what is not given for the keys is that of the queries.
    """
    cu_kv = cu_seqlens_q if cu_seqlens_kv is None else cu_seqlens_kv
    kv_len = max_q_len if max_kv_len is None else max_kv_len
    q_valid = _row_validity(("cu_seqlens_q", cu_seqlens_q), ("max_q_len", max_q_len))
    kv_valid = _row_validity(("cu_seqlens_kv", cu_kv), ("max_kv_len", kv_len))
    return q_valid.astype(dtype), kv_valid.astype(dtype)


def qkv_cu_seqlens_to_attention_mask(
    cu_seqlens_q: ArrayLike,
    *,
    max_q_len: int,
    cu_seqlens_kv: ArrayLike | None = None,
    max_kv_len: int | None = None,
    dtype: DTypeLike = jnp.bool_,
) -> jax.Array:
    """Returns the pairwise mask [sequences, 1, max_q_len, max_kv_len] of padded rows: valid query and valid key.

    See `qkv_cu_seqlens_to_qkv_masks` for the arguments.

    Raises:
        ValueError: The two vectors do not describe the same number of sequences.
    """
    q_valid, kv_valid = qkv_cu_seqlens_to_qkv_masks(
        cu_seqlens_q, max_q_len=max_q_len, cu_seqlens_kv=cu_seqlens_kv, max_kv_len=max_kv_len
    )
    if q_valid.shape[0] != kv_valid.shape[0]:
        raise ValueError(f"cu_seqlens_kv: got shape ({kv_valid.shape[0] + 1},), wants ({q_valid.shape[0] + 1},)")
    return (q_valid[:, None, :, None] & kv_valid[:, None, None, :]).astype(dtype)


def attention_mask_to_qkv_cu_seqlens(
    attention_mask: ArrayLike,
    *,
    reduce_heads: Literal["any", "all", "first"] = "any",
    out_dtype: DTypeLike = jnp.int32,
) -> tuple[jax.Array, jax.Array]:
    """Turns an attention mask into the cumulative lengths of padded rows.

    Args:
        attention_mask: [batch, length] validity of both sides, [batch, q_len, kv_len] or [batch, heads, q_len, kv_len];
            every value but 0 attends. In a pairwise mask a token is valid if it takes part in any pair.
        reduce_heads: Whether a pair attends if it does in any head, in all heads or in the first head.
        out_dtype: Of the results.

    Returns:
        Two vectors [batch + 1].

    Raises:
        ValueError: The mask has another rank, or `reduce_heads` is unknown.
    """
    check_choice("reduce_heads", reduce_heads, tuple(_HEAD_REDUCTIONS))
    shapes = {2: "[batch, length]", 3: "[batch, q_len, kv_len]", 4: "[batch, heads, q_len, kv_len]"}
    attends = as_bool_mask(attention_mask)
    check_rank("attention_mask", attends.shape, shapes)
    if attends.ndim == 2:
        return qkv_masks_to_cu_seqlens(attends, out_dtype=out_dtype)
    if attends.ndim == 4:
        attends = _HEAD_REDUCTIONS[reduce_heads](attends)
    return qkv_masks_to_cu_seqlens(attends.any(axis=-1), attends.any(axis=-2), out_dtype=out_dtype)
