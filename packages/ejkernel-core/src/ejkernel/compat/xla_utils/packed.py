"""Computes indices of the tokens and chunks of packed sequences from cumulative lengths.

`cu_seqlens` is always [N + 1] integers that start at 0 and never decrease: sequence n owns the tokens
`cu_seqlens[n] : cu_seqlens[n + 1]`. Empty sequences keep their indices. Values that are not traced are checked, for
which an eager call waits.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike
from jaxtyping import Array, Bool, Integer

from ejkernel import _compat
from ejkernel.modules.operations.shared.shapes import as_count, check_cumulative_lengths, check_dtype, check_shape
from ejkernel.planning.packing import packed_ids
from ejkernel.types.segments import as_bool_mask


def prepare_lens(cu_seqlens: Integer[Array, " n+1"]) -> Integer[Array, " n"]:
    """Returns the length of every sequence, [N] int32.

    Args:
        cu_seqlens: [N + 1] int, may be traced.

    Raises:
        ValueError: `cu_seqlens` is not such a vector.

    Example:
        ```python
        import jax.numpy as jnp
        from ejkernel.xla_utils import prepare_lens

        assert prepare_lens(jnp.array([0, 2, 2, 5])).tolist() == [2, 0, 3]
        ```
    """
    return jnp.diff(as_cumulative_lengths(cu_seqlens))


def prepare_lens_from_mask(mask: Bool[Array, "b t"] | Integer[Array, "b t"]) -> Integer[Array, " b"]:
    """Returns the number of valid tokens of every row, [B] int32.

    Args:
        mask: [B, T]; every value but 0 is a valid token.

    Raises:
        ValueError: The mask has another rank.
    """
    check_shape("mask", mask, "B T", {})
    return jnp.sum(as_bool_mask(mask), axis=1, dtype=jnp.int32)


def prepare_cu_seqlens_from_mask(
    mask: Bool[Array, "b t"] | Integer[Array, "b t"], out_dtype: DTypeLike = jnp.int32
) -> Integer[Array, " b+1"]:
    """Returns the cumulative numbers of valid tokens of the rows, [B + 1].

    Args:
        mask: [B, T]; every value but 0 is a valid token.
        out_dtype: Integer dtype of the result.

    Raises:
        ValueError: The mask has another rank.
    """
    ends = jnp.cumsum(prepare_lens_from_mask(mask), dtype=out_dtype)
    return jnp.concatenate([jnp.zeros(1, ends.dtype), ends])


def prepare_sequence_ids(cu_seqlens: Integer[Array, " n+1"], total: int | None = None) -> Integer[Array, " total"]:
    """Returns the sequence that every token belongs to, [total] int32.

    Args:
        cu_seqlens: [N + 1] int, may be traced.
        total: Tokens in the row; None means `cu_seqlens[-1]`, which must not be traced then.

    Returns:
        Numbers 0 to N - 1; tokens after the last sequence have -1.

    Raises:
        ValueError: `cu_seqlens` is not such a vector, does not fit in `total`, or is traced without `total`.

    Example:
        ```python
        import jax, jax.numpy as jnp
        from ejkernel.xla_utils import prepare_sequence_ids

        assert prepare_sequence_ids(jnp.array([0, 2, 2, 5])).tolist() == [0, 0, 2, 2, 2]
        ids = jax.jit(prepare_sequence_ids, static_argnums=1)(jnp.array([0, 2, 2, 5]), 6)
        assert ids.tolist() == [0, 0, 2, 2, 2, -1]
        ```
    """
    return packed_ids(*_cumulative_lengths_and_total(cu_seqlens, total))[0][0]


def prepare_position_ids(cu_seqlens: Integer[Array, " n+1"], total: int | None = None) -> Integer[Array, " total"]:
    """Returns the place of every token in its sequence, [total] int32; tokens after the last sequence have 0.

    Args:
        cu_seqlens: [N + 1] int, may be traced.
        total: As of `prepare_sequence_ids`.

    Raises:
        ValueError: In the same cases as in `prepare_sequence_ids`.
    """
    return packed_ids(*_cumulative_lengths_and_total(cu_seqlens, total))[1][0]


def prepare_token_indices(cu_seqlens: Integer[Array, " n+1"], total: int | None = None) -> Integer[Array, "total 2"]:
    """Returns (sequence, index in it) of every token, [total, 2] int32; tokens after the last sequence have (-1, 0).

    Args:
        cu_seqlens: [N + 1] int, may be traced.
        total: As of `prepare_sequence_ids`.

    Raises:
        ValueError: In the same cases as in `prepare_sequence_ids`.
    """
    ids, positions = packed_ids(*_cumulative_lengths_and_total(cu_seqlens, total))
    return jnp.stack([ids[0], positions[0]], axis=1)


def prepare_chunk_offsets(cu_seqlens: Integer[Array, " n+1"], chunk_size: int) -> Integer[Array, " n+1"]:
    """Returns the number of chunks before every sequence, and in all, [N + 1] int32.

    Args:
        cu_seqlens: [N + 1] int, may be traced.
        chunk_size: Tokens of a chunk; a sequence is cut from its first token on, and its last chunk may be shorter.

    Raises:
        ValueError: `cu_seqlens` is not such a vector, or `chunk_size` is no int of at least 1.
    """
    size = as_count("chunk_size", chunk_size, minimum=1)
    chunks = -(-jnp.diff(as_cumulative_lengths(cu_seqlens)) // size)
    return jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(chunks, dtype=jnp.int32)])


def prepare_chunk_indices(
    cu_seqlens: Integer[Array, " n+1"], chunk_size: int, num_chunks: int | None = None
) -> Integer[Array, "chunks 2"]:
    """Returns (sequence, index in it) of every chunk, [num_chunks, 2] int32; rows after the last chunk are (-1, 0).

    Args:
        cu_seqlens: [N + 1] int, may be traced.
        chunk_size: Tokens of a chunk, as of `prepare_chunk_offsets`.
        num_chunks: Rows of the result; None means as many as there are chunks, and `cu_seqlens` must not be traced
            then. `min(T, (T + N * (chunk_size - 1)) // chunk_size)` is enough for N sequences of T tokens.

    Raises:
        ValueError: In the same cases as in `prepare_chunk_offsets`, or `num_chunks` is missing under a trace or too
            small.

    Example:
        ```python
        import jax.numpy as jnp
        from ejkernel.xla_utils import prepare_chunk_indices

        chunks = prepare_chunk_indices(jnp.array([0, 2, 2, 7]), chunk_size=2)
        assert chunks.tolist() == [[0, 0], [2, 0], [2, 1], [2, 2]]
        ```
    """
    offsets = prepare_chunk_offsets(cu_seqlens, chunk_size)
    chunks = _checked_size("num_chunks", num_chunks, offsets, "the number of chunks")
    ids, numbers = packed_ids(offsets, chunks)
    return jnp.stack([ids[0], numbers[0]], axis=1)


def as_cumulative_lengths(cu_seqlens: ArrayLike, total: int | None = None) -> jax.Array:
    """Returns cumulative lengths as an int32 array; raises ValueError if they are none, or do not fit in `total`
    tokens.
    """
    array = jnp.asarray(cu_seqlens)
    check_shape("cu_seqlens", array, "N+1", {})
    if array.shape[0] == 0:
        raise ValueError("cu_seqlens: got shape (0,), wants [N + 1] integers, the first of which is 0")
    check_dtype("cu_seqlens", array, jnp.integer, "an integer dtype")
    check_cumulative_lengths("cu_seqlens", array, 1, np.iinfo(np.int32).max if total is None else total)
    return array.astype(jnp.int32)


def _cumulative_lengths_and_total(cu_seqlens: ArrayLike, total: int | None) -> tuple[jax.Array, int]:
    lengths = as_cumulative_lengths(cu_seqlens)
    return lengths, _checked_size("total", total, lengths, "the number of tokens")


def _checked_size(name: str, requested: int | None, cumulative_sizes: jax.Array, counted_things: str) -> int:
    """Returns the size of a result: as given, or the last of `cumulative_sizes`, which may not exceed it if it can
    be read.
    """
    if _compat.is_tracer(cumulative_sizes):
        if requested is None:
            raise ValueError(
                f"{name}: got None with a traced cu_seqlens, wants {counted_things} as an int: it sets a shape"
            )
        return as_count(name, requested)
    needed = int(cumulative_sizes[-1])
    size = needed if requested is None else as_count(name, requested)
    if size < needed:
        raise ValueError(f"{name}: got {size}, wants at least {needed}, {counted_things} that cu_seqlens describes")
    return size
