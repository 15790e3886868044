"""The methods of MaskInfo that compute one representation from another. Each is bound to the class as a method.

Nothing is remembered: every call computes from the stored parts, so no tracer can leak into a MaskInfo that lives
longer.
"""

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from ejkernel.types.constructors import KV_PADDING_POSITION
from ejkernel.types.cu_seqlens import segment_ids_to_cu_seqlens
from ejkernel.types.mask_parts import MaskParts
from ejkernel.types.segments import mask_to_segment_ids, same_segment_mask, segment_ids_to_positions

_EMPTY_MASK_ERROR = "an empty MaskInfo says nothing about tokens; make it with a mask or with segment ids"


def get_or_compute_attention_mask(info: MaskParts, dtype: DTypeLike = jnp.bool_) -> jax.Array:
    """Returns one dense mask that combines the explicit mask and the segment ids of a `MaskInfo`.

    Args:
        info: The mask.
        dtype: The dtype of the result. Pairs that attend become 1, all others 0.

    Returns:
        The mask [batch, heads or 1, q_len, kv_len].

    Raises:
        ValueError: The mask is empty.
    """
    mask, q_ids, kv_ids = info.explicit_mask, info.explicit_q_segment_ids, info.explicit_kv_segment_ids
    if q_ids is not None and kv_ids is not None:
        same = same_segment_mask(q_ids, kv_ids)[:, None]
        mask = same if mask is None else mask & same
    if mask is None:
        raise ValueError(_EMPTY_MASK_ERROR)
    return mask.astype(dtype)


def get_or_compute_segment_ids(info: MaskParts, per_head: bool = False) -> tuple[jax.Array, jax.Array]:
    """Returns the stored segment ids, or those `mask_to_segment_ids` finds.

    Args:
        info: The mask.
        per_head: Whether each head of the mask gets ids of its own; they are found in the mask even if ids are stored.

    Returns:
        [batch, q_len] and [batch, kv_len] int32, or [batch, heads or 1, length] if `per_head`.

    Raises:
        ValueError: The mask is empty.
    """
    q_ids, kv_ids = info.explicit_q_segment_ids, info.explicit_kv_segment_ids
    if q_ids is None or kv_ids is None or (per_head and info.explicit_mask is not None):
        return mask_to_segment_ids(get_or_compute_attention_mask(info), per_head)
    return (q_ids[:, None], kv_ids[:, None]) if per_head else (q_ids, kv_ids)


def get_or_compute_positions(info: MaskParts) -> tuple[jax.Array | None, jax.Array | None]:
    """Returns the stored positions, or the places of the tokens in their segments.

    Args:
        info: The mask.

    Returns:
        [batch, q_len] and [batch, kv_len] int32, from 0 in every segment. Padding is -1 for queries and the highest
        int32 for keys, so that no causal rule reaches it. Of an empty mask what is stored, which may be None.
    """
    q_positions, kv_positions = info.q_positions, info.kv_positions
    if info.is_empty or (q_positions is not None and kv_positions is not None):
        return q_positions, kv_positions
    q_ids, kv_ids = get_or_compute_segment_ids(info)
    if q_positions is None:
        q_positions = segment_ids_to_positions(q_ids)
    if kv_positions is None:
        kv_positions = segment_ids_to_positions(kv_ids, pad_value=KV_PADDING_POSITION)
    return q_positions, kv_positions


def get_or_compute_qkv_cu_seqlens(
    info: MaskParts, *, out_dtype: DTypeLike = jnp.int32, max_segments: int = 128
) -> tuple[jax.Array, jax.Array]:
    """Returns the stored cumulative lengths, or counts the tokens of every segment id.

    Args:
        info: The mask. Ids are counted over the whole batch, so the result describes a packed layout if the batch is
            one row.
        out_dtype: Of the results.
        max_segments: Static number of ids that are counted, from 0; not used if lengths are stored.

    Returns:
        Two vectors, [sequences + 1] if stored, else [max_segments + 1]. An id that is not used is an empty sequence.

    Raises:
        ValueError: The mask is empty.
    """
    cu_q, cu_kv = info.explicit_cu_seqlens_q, info.explicit_cu_seqlens_kv
    if cu_q is None or cu_kv is None:
        q_ids, kv_ids = get_or_compute_segment_ids(info)
        cu_q = segment_ids_to_cu_seqlens(q_ids, max_segments=max_segments)
        cu_kv = segment_ids_to_cu_seqlens(kv_ids, max_segments=max_segments)
    return cu_q.astype(out_dtype), cu_kv.astype(out_dtype)


def get_qkv_masks(info: MaskParts, dtype: DTypeLike = jnp.bool_) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns validity and mask.

    Args:
        info: The mask.
        dtype: Of the results; True becomes 1.

    Returns:
        Validity [batch, q_len] of the queries, [batch, kv_len] of the keys, and the mask [batch, heads or 1, q_len,
        kv_len].

    Raises:
        ValueError: The mask is empty.
    """
    q_ids, kv_ids = get_or_compute_segment_ids(info)
    return (q_ids >= 0).astype(dtype), (kv_ids >= 0).astype(dtype), get_or_compute_attention_mask(info, dtype)


def create_bias(info: MaskParts, dtype: DTypeLike = jnp.float32) -> jax.Array:
    """Returns [batch, heads or 1, q_len, kv_len] in `dtype`: 0 where a pair attends, else the lowest finite number.

    Raises:
        ValueError: The mask is empty.
    """
    masked = jnp.asarray(jnp.finfo(dtype).min, dtype)
    return jnp.where(get_or_compute_attention_mask(info), jnp.zeros((), dtype), masked)


def is_self_attention(info: MaskParts) -> jax.Array:
    """Returns a [] bool: both sides have equal ids, or, if no ids are stored, the mask is square. False if empty."""
    q_ids, kv_ids = info.explicit_q_segment_ids, info.explicit_kv_segment_ids
    if q_ids is None or kv_ids is None or q_ids.shape != kv_ids.shape:
        return jnp.asarray(q_ids is None and info.q_len is not None and info.q_len == info.kv_len)
    return (q_ids == kv_ids).all()
