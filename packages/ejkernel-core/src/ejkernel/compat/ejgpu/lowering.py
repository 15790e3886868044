"""Attention whose queries and keys end together, as calls of `ejkernel.modules.flash_attention`."""

from typing import Any

import jax
import jax.numpy as jnp

from ejkernel import modules
from ejkernel.planning.packing import packed_ids
from ejkernel.types import MaskInfo

QueryAndKeyArrays = tuple[jax.Array, jax.Array]
QueryKeyValue = tuple[jax.Array, jax.Array, jax.Array]


def dense_attention(
    arrays: QueryKeyValue, bias: Any, slopes: Any, lengths: QueryAndKeyArrays | None, options: dict[str, Any]
) -> jax.Array:
    """Returns attention of rows, [B, T, H, V].

    Args:
        arrays: Query [B, T, H, D], key and value [B, S, Hk, D].
        bias: [B|1, H|1, T|1, S|1], or None.
        slopes: [B, H], or None.
        lengths: Queries and keys that each row has, int32 [B] each; None where all count.
        options: Of `flash_attention`.
    """
    queries, keys = arrays[0].shape[1], arrays[1].shape[1]
    q_positions, k_positions = jnp.arange(queries, dtype=jnp.int32)[None], jnp.arange(keys, dtype=jnp.int32)[None]
    mask: dict[str, Any] = {}
    ends = q_positions + (keys - queries)
    if lengths is not None:
        q_lengths, k_lengths = (x[:, None] for x in lengths)
        ends = q_positions + (k_lengths - q_lengths)
        mask["_q_segment_ids"] = jnp.where(q_positions < q_lengths, 0, -1)
        mask["_kv_segment_ids"] = jnp.where(k_positions < k_lengths, 0, -1)
    # Rows of one length need no positions, and indices let tiles be skipped at compile time.
    if options["causal"] and (lengths is not None or queries != keys):
        mask |= {"q_positions": ends, "kv_positions": k_positions}
    if slopes is not None:
        distance = -k_positions[:, None] if options["causal"] else jnp.abs(ends[:, :, None] - k_positions[:, None])
        alibi = _to_float32_or_wider(slopes)[:, :, None, None] * -distance[:, None]
        bias = alibi if bias is None else bias + alibi
    return modules.flash_attention(*arrays, bias, mask_info=MaskInfo(**mask) if mask else None, **options)


def packed_attention(
    arrays: QueryKeyValue, cu_seqlens: QueryAndKeyArrays, slopes: Any, options: dict[str, Any]
) -> jax.Array:
    """Returns attention of packed sequences in their layout, [1, total_q, H, V], in memory linear in the lengths.

    Among the keys that a causal query sees, `-slope * (i + L_k - L_q - j)` is `slope * j` and a number that all of them
    have, which the softmax drops: slopes need one number per head and key.

    Args:
        arrays: Query [1, total_q, H, D], key and value [1, total_k, Hk, D].
        cu_seqlens: Of queries and keys, int32 [N + 1] each; the same array where both are packed alike.
        slopes: [N, H], or None; they must be causal.
        options: Of `flash_attention`.
    """
    cu_q, cu_k = cu_seqlens
    k_ids, k_positions = packed_ids(cu_k, arrays[1].shape[1])
    bias = mask = None
    if slopes is not None:
        of_keys = _to_float32_or_wider(slopes)[jnp.maximum(k_ids[0], 0)] * k_positions[0][:, None]
        bias = of_keys.T[None, :, None]
    if options["causal"] and cu_q is not cu_k:
        q_ids, q_positions = packed_ids(cu_q, arrays[0].shape[1])
        surplus = (jnp.diff(cu_k) - jnp.diff(cu_q))[jnp.maximum(q_ids, 0)]
        mask = MaskInfo(q_positions=q_positions + surplus, kv_positions=k_positions)
    lengths = (cu_q, None if cu_q is cu_k else cu_k)
    return modules.flash_attention(*arrays, bias, *lengths, mask_info=mask, **options)


def attention_in_padded_rows(
    arrays: QueryKeyValue,
    cu_seqlens: QueryAndKeyArrays,
    padded_row_lengths: tuple[int, int],
    bias_and_slopes: tuple[Any, Any],
    options: dict[str, Any],
) -> jax.Array:
    """Returns attention of packed sequences, each in a padded row of its own, [total_q, H, V].

    Args:
        arrays: As of `packed_attention`.
        cu_seqlens: As of `packed_attention`.
        padded_row_lengths: Tokens of a row of queries and of keys.
        bias_and_slopes: Bias [N|1, H|1, T|1, S|1] and slopes [N, H], or None.
        options: Of `flash_attention`.
    """
    cu_q, cu_k = cu_seqlens
    query, key, value = (
        _padded_rows(x, cu, width)
        for x, cu, width in zip(
            arrays,
            (cu_q, cu_k, cu_k),
            (padded_row_lengths[0], padded_row_lengths[1], padded_row_lengths[1]),
            strict=True,
        )
    )
    output = dense_attention((query, key, value), *bias_and_slopes, (jnp.diff(cu_q), jnp.diff(cu_k)), options)
    ids, positions = (x[0] for x in packed_ids(cu_q, arrays[0].shape[1]))
    return jnp.where((ids >= 0)[:, None, None], output[jnp.maximum(ids, 0), positions], 0)


def _padded_rows(x: jax.Array, cu_seqlens: jax.Array, row_length: int) -> jax.Array:
    """Returns [N, width, ...] from [1, total, ...]; what lies after a sequence is somebody else's, and masked."""
    token = cu_seqlens[:-1, None] + jnp.arange(row_length, dtype=jnp.int32)
    return x[0][jnp.minimum(token, x.shape[1] - 1)]


def _to_float32_or_wider(x: jax.Array) -> jax.Array:
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))
