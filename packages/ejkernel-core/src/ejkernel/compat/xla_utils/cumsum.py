"""Cumulative sums that start anew with every sequence, or with every chunk of one."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Integer

from ejkernel.compat.xla_utils.packed import as_cumulative_lengths
from ejkernel.families.segment_pooling import chunk_ranges
from ejkernel.modules.operations.shared.shapes import as_count, as_flag, as_number, check_dtype, got
from ejkernel.planning.packing import packed_ids
from ejkernel.promotion import with_standard_promotion


@with_standard_promotion
def chunk_local_cumsum(
    g: Float[Array, "b t h"] | Float[Array, "b t h k"],
    chunk_size: int,
    reverse: bool = False,
    softmax_scale: float | None = None,
    cu_seqlens: Integer[Array, " n+1"] | None = None,
    head_first: bool = False,
    output_dtype: DTypeLike | None = jnp.float32,
) -> Float[Array, "b t h"] | Float[Array, "b t h k"]:
    """Returns the sum of every token and those before it in its chunk. Differentiable.

    Args:
        g: [B, T, H] or [B, T, H, K] floating; [B, H, T] or [B, H, T, K] with `head_first`.
        chunk_size: Tokens of a chunk, an int >= 1. Chunks are counted from the first token of each sequence, and need
            not divide it.
        reverse: Sum every token and those after it instead.
        softmax_scale: Factor on the sums; None is 1.
        cu_seqlens: [N + 1] int, N sequences packed in the single row (B = 1); may be traced. Padding tokens get 0.
        head_first: Whether the heads come before the tokens.
        output_dtype: Of the result; None means g's. Sums are float32 at least, whatever comes in or out.

    Returns:
        Sums in the shape of g.

    Raises:
        ValueError: A shape, dtype or value is wrong; the message names the argument.

    Example:
        ```python
        import jax.numpy as jnp
        from ejkernel.xla_utils import chunk_local_cumsum

        g = jnp.ones((1, 5, 1))
        assert chunk_local_cumsum(g, 2)[0, :, 0].tolist() == [1, 2, 1, 2, 1]
        assert chunk_local_cumsum(g, 2, cu_seqlens=jnp.array([0, 3, 5]))[0, :, 0].tolist() == [1, 2, 1, 1, 2]
        ```
    """
    size = as_count("chunk_size", chunk_size, minimum=1)
    return _checked_cumsum("g", g, size, reverse, softmax_scale, cu_seqlens, head_first, output_dtype)


@with_standard_promotion
def chunk_global_cumsum(
    s: Float[Array, "b t h"] | Float[Array, "b t h k"],
    reverse: bool = False,
    cu_seqlens: Integer[Array, " n+1"] | None = None,
    softmax_scale: float | None = None,
    head_first: bool = False,
    output_dtype: DTypeLike | None = jnp.float32,
) -> Float[Array, "b t h"] | Float[Array, "b t h k"]:
    """Returns the sum of every token and those before it in its sequence. Differentiable.

    Args:
        s: [B, T, H] or [B, T, H, K] floating; [B, H, T] or [B, H, T, K] with `head_first`.
        reverse: Sum every token and those after it instead.
        cu_seqlens: [N + 1] int, N sequences packed in the single row (B = 1); may be traced. Padding tokens get 0.
        softmax_scale: Factor on the sums; None is 1.
        head_first: Whether the heads come before the tokens.
        output_dtype: Of the result; None means that of s. Sums are float32 at least, whatever comes in or out.

    Returns:
        Sums in the shape of s.

    Raises:
        ValueError: A shape, dtype or value is wrong; the message names the argument.

    Example:
        ```python
        import jax.numpy as jnp
        from ejkernel.xla_utils import chunk_global_cumsum

        sums = chunk_global_cumsum(jnp.ones((1, 5, 1)), reverse=True, cu_seqlens=jnp.array([0, 3, 5]))
        assert sums[0, :, 0].tolist() == [3, 2, 1, 2, 1]
        ```
    """
    return _checked_cumsum("s", s, None, reverse, softmax_scale, cu_seqlens, head_first, output_dtype)


def _checked_cumsum(
    name: str,
    values: jax.Array,
    chunk_size: int | None,
    reverse: bool,
    softmax_scale: float | None,
    cu_seqlens: Any,
    head_first: bool,
    output_dtype: DTypeLike | None,
) -> jax.Array:
    axis = 2 if as_flag("head_first", head_first) else 1
    _check_rank_and_dtype(name, values, cu_seqlens, "B, H, T" if axis == 2 else "B, T, H")
    scale = 1.0 if softmax_scale is None else as_number("softmax_scale", softmax_scale)
    tokens, backwards = values.shape[axis], as_flag("reverse", reverse)
    bounds = jnp.array([0, tokens], jnp.int32) if cu_seqlens is None else as_cumulative_lengths(cu_seqlens, tokens)
    wide = jnp.moveaxis(values.astype(jnp.promote_types(values.dtype, jnp.float32)), axis, 1)
    if tokens == 0 or bounds.shape[0] == 1:
        sums = jnp.zeros_like(wide)
    elif chunk_size is None:
        sums = _sums_within_sequences(wide, bounds, backwards)
    else:
        sums = _sums_within_chunks(wide, bounds, min(chunk_size, tokens), backwards)
    sums = jnp.moveaxis(sums * scale, 1, axis)
    return sums.astype(values.dtype if output_dtype is None else output_dtype)


def _check_rank_and_dtype(name: str, values: Any, cu_seqlens: Any, axes: str) -> None:
    rank = getattr(values, "ndim", None)
    if rank not in (3, 4):
        raise ValueError(f"{name}: got {got(values)}, wants [{axes}] or [{axes}, K]")
    check_dtype(name, values, jnp.floating, "a floating dtype")
    if cu_seqlens is not None and values.shape[0] != 1:
        raise ValueError(f"{name}: got shape {values.shape} with cu_seqlens, wants one row: [{axes.replace('B', '1')}]")


def _sums_within_chunks(values: jax.Array, bounds: jax.Array, size: int, backwards: bool) -> jax.Array:
    """Returns sums within chunks, [B, T, ...]."""
    return _tokens_from_chunks(_sums_of_chunk_rows(values, bounds, size, backwards), bounds, size, values.shape[1])


def _sums_within_sequences(values: jax.Array, bounds: jax.Array, backwards: bool) -> jax.Array:
    """Returns sums within sequences, [B, T, ...]: within chunks of about sqrt(T) tokens, then over the chunks before.

    Sums over the whole row, of which two would be subtracted, lose digits and turn gates of -inf into NaN.
    """
    tokens = values.shape[1]
    size = max(1, math.isqrt(tokens))
    sums = _sums_of_chunk_rows(values, bounds, size, backwards)
    # A sum starts anew with the first chunk of a sequence, or, backwards, after its last one.
    ranges = chunk_ranges(bounds, size, tokens)
    begins = jnp.isin(ranges[:, 1], bounds[1:]) if backwards else jnp.isin(ranges[:, 0], bounds[:-1])

    def add_chunk_total(carry: jax.Array, chunk: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        begin, total = chunk
        before = jnp.where(begin, 0, carry)
        return before + total, before

    totals = jnp.moveaxis(sums[:, :, 0 if backwards else -1], 1, 0)
    before = jax.lax.scan(add_chunk_total, jnp.zeros_like(totals[0]), (begins, totals), reverse=backwards)[1]
    return _tokens_from_chunks(sums + jnp.moveaxis(before, 0, 1)[:, :, None], bounds, size, tokens)


def _sums_of_chunk_rows(values: jax.Array, bounds: jax.Array, size: int, backwards: bool) -> jax.Array:
    """Returns sums within chunks of packed sequences, a row each: [B, M, size, ...]."""
    first, end = chunk_ranges(bounds, size, values.shape[1]).T[..., None]
    token = first + jnp.arange(size, dtype=jnp.int32)
    rows = jnp.take(values, jnp.minimum(token, values.shape[1] - 1), axis=1)
    inside = (token < end).reshape(1, *token.shape, *[1] * (values.ndim - 2))
    return jax.lax.cumsum(jnp.where(inside, rows, 0), axis=2, reverse=backwards)


def _tokens_from_chunks(rows: jax.Array, bounds: jax.Array, size: int, tokens: int) -> jax.Array:
    """Returns the values of the tokens, [B, T, ...], from those of their chunks; 0 for padding tokens."""
    ids, positions = (x[0] for x in packed_ids(bounds, tokens))
    chunks = -(-jnp.diff(bounds) // size)
    before = (jnp.cumsum(chunks) - chunks)[jnp.maximum(ids, 0)]
    flat = rows.reshape(rows.shape[0], -1, *rows.shape[3:])
    values = jnp.take(flat, (before + positions // size) * size + positions % size, axis=1, mode="clip")
    return jnp.where((ids >= 0).reshape(1, -1, *[1] * (values.ndim - 2)), values, 0)
