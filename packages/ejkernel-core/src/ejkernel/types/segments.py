"""Conversions between attention masks and segment ids.

A segment id belongs to one token. Two tokens attend to each other when their ids are equal and not negative; a negative
id is padding. Segment ids can express only block-structured masks: every query and every key lies in at most one block,
and inside a block everything attends to everything.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike, DTypeLike

from ejkernel.promotion import with_standard_promotion
from ejkernel.types.checks import check_rank
from ejkernel.types.integers import as_array, exact_segment_ids

_PAIRWISE_SHAPES = {2: "[q_len, kv_len]", 3: "[batch, q_len, kv_len]", 4: "[batch, heads, q_len, kv_len]"}
_SEGMENT_SHAPES = {1: "[length]", 2: "[batch, length]", 3: "[batch, heads, length]"}


def as_bool_mask(mask: Any) -> jax.Array:
    """Returns `mask` as booleans: every value but 0 is True."""
    array = jnp.asarray(mask)
    return array if array.dtype == jnp.bool_ else array != 0


def validity_to_segment_ids(valid: ArrayLike) -> jax.Array:
    """Returns int32 ids of the shape of `valid`: 0 where True or not zero, -1 (padding) elsewhere."""
    return jnp.where(as_bool_mask(valid), 0, -1).astype(jnp.int32)


def padding_segment_ids(mask: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns ids that carry only the padding of a mask.

    Args:
        mask: [..., q_len, kv_len], True attends.

    Returns:
        [..., q_len] and [..., kv_len] int32: -1 for a query that attends to nothing and for a key no query attends to,
        else 0.
    """
    attends = as_bool_mask(mask)
    return validity_to_segment_ids(attends.any(axis=-1)), validity_to_segment_ids(attends.any(axis=-2))


def same_segment_mask(q_segment_ids: jax.Array, kv_segment_ids: jax.Array) -> jax.Array:
    """Returns [..., q_len, kv_len] booleans: ids [..., q_len] and [..., kv_len] are equal and not negative."""
    q_ids, kv_ids = q_segment_ids[..., :, None], kv_segment_ids[..., None, :]
    return (q_ids == kv_ids) & (q_ids >= 0)


@with_standard_promotion
def segment_ids_to_positions(segment_ids: ArrayLike, *, pad_value: int = -1) -> jax.Array:
    """Counts tokens from 0 in every run of equal ids.

    Args:
        segment_ids: [..., length] integers; negative is padding and ends a run.
        pad_value: Position of a padding token.

    Returns:
        [..., length] int32.
    """
    ids = _exact_ids(segment_ids)
    index = jnp.arange(ids.shape[-1], dtype=jnp.int32)
    starts = jnp.concatenate([jnp.ones_like(ids[..., :1], bool), ids[..., 1:] != ids[..., :-1]], axis=-1)
    run_start = jax.lax.cummax(jnp.where(starts, index, 0), axis=ids.ndim - 1)
    return jnp.where(ids >= 0, index - run_start, pad_value).astype(jnp.int32)


def mask_to_segment_ids(mask: ArrayLike, per_head: bool = False) -> tuple[jax.Array, jax.Array]:
    """Finds segment ids of a mask; never ids that hide something the mask attends to.

    A block-structured mask gives the ids of its blocks, counted from 0 in the order of their first query, and the ids
    express the mask exactly. Any other mask (causal, random) gives padding alone: -1 for queries and keys that take
    part in nothing, 0 for the rest. In both cases `segment_ids_to_mask(ids) & mask == mask`. The choice is made per row
    of the batch, on values, and works under jit.

    Args:
        mask: [q_len, kv_len], [batch, q_len, kv_len] or [batch, heads, q_len, kv_len]; every value but 0 attends.
        per_head: Whether each head of a 4-D mask gets ids of its own; if not, a pair attends when it does in any head.

    Returns:
        Ids of the queries and of the keys, int32: the leading dimensions of `mask` (without the heads, if they are
            joined), then
        q_len and kv_len.

    Raises:
        ValueError: The mask has another rank.
    """
    attends = as_bool_mask(mask)
    check_rank("mask", attends.shape, _PAIRWISE_SHAPES)
    if attends.ndim == 4 and not per_head:
        attends = attends.any(axis=1)
    find = _find_blocks
    for _ in range(attends.ndim - 2):
        find = jax.vmap(find)
    return find(attends)


def _find_blocks(attends: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns `mask_to_segment_ids` of one [q_len, kv_len] mask."""
    padding_only = padding_segment_ids(attends)
    if 0 in attends.shape:  # argmax has no answer along an empty axis, and nothing attends anyway
        return padding_only
    q_ids, kv_ids = padding_only
    # In a block-structured mask all queries of a block share their first key, and that key's first query opens the
    # block.
    first_key = jnp.argmax(attends, axis=1)
    first_query = jnp.argmax(attends, axis=0)
    opener = first_query[first_key]
    opens = (opener == jnp.arange(attends.shape[0])) & (q_ids >= 0)
    block = (jnp.cumsum(opens) - 1).astype(jnp.int32)[opener]
    blocks = jnp.where(q_ids >= 0, block, -1), jnp.where(kv_ids >= 0, block[first_query], -1)
    exact = (same_segment_mask(*blocks) == attends).all()
    return jnp.where(exact, blocks[0], q_ids), jnp.where(exact, blocks[1], kv_ids)


def segment_ids_to_mask(
    segment_ids: ArrayLike | tuple[ArrayLike, ArrayLike],
    dtype: DTypeLike = jnp.bool_,
    return_separate_masks: bool = False,
) -> jax.Array | tuple[jax.Array, jax.Array, jax.Array]:
    """Writes segment ids out as a pairwise mask.

    Args:
        segment_ids: [batch, length] ids of both sides, or a tuple of ids of the queries and of the keys. Ids of rank 1
            and [batch, heads, length] (see `mask_to_segment_ids`) work too.
        dtype: Of the results; True becomes 1.
        return_separate_masks: Whether the validity of each side is returned as well.

    Returns:
        The mask [batch, 1, q_len, kv_len] ([q_len, kv_len] for rank 1, [batch, heads, q_len, kv_len] for rank 3), or
        (query validity, key validity, mask); a validity has the shape of its ids.

    Raises:
        ValueError: The ids have another rank, or two different ones.
    """
    pair = segment_ids if isinstance(segment_ids, tuple) else (segment_ids, segment_ids)
    q_ids, kv_ids = _exact_id_pair(*pair)
    check_rank("segment_ids", q_ids.shape, _SEGMENT_SHAPES)
    check_rank("kv segment_ids", kv_ids.shape, {q_ids.ndim: _SEGMENT_SHAPES[q_ids.ndim]})
    mask = same_segment_mask(q_ids, kv_ids).astype(dtype)
    mask = mask[:, None] if q_ids.ndim == 2 else mask
    return ((q_ids >= 0).astype(dtype), (kv_ids >= 0).astype(dtype), mask) if return_separate_masks else mask


def _exact_ids(ids: Any) -> jax.Array:
    return _exact_id_pair(ids, ids)[0]


def _exact_id_pair(queries: Any, keys: Any) -> tuple[jax.Array, jax.Array]:
    """Returns ids as int32; NumPy's are converted exactly, where JAX would wrap them around."""
    q_ids, kv_ids = as_array(queries), as_array(keys)
    q_ids, kv_ids = exact_segment_ids(q_ids, q_ids if queries is keys else kv_ids)
    return jnp.asarray(q_ids), jnp.asarray(kv_ids)


def segment_ids_to_qkv_masks(
    q_segment_ids: ArrayLike, kv_segment_ids: ArrayLike | None = None, dtype: DTypeLike = jnp.bool_
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns (query validity, key validity, mask) as `segment_ids_to_mask` does; keys default to the queries."""
    kv_ids = q_segment_ids if kv_segment_ids is None else kv_segment_ids
    masks = segment_ids_to_mask((q_segment_ids, kv_ids), dtype, return_separate_masks=True)
    return masks[0], masks[1], masks[2]
