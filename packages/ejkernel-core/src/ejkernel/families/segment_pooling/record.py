"""Defines the argument record of segment pooling, and functions of the record alone."""

from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.arithmetic import cdiv
from ejkernel.types.arguments import arguments, static


@arguments
class SegmentPooling:
    """Canonical input of one pooling. B rows, T tokens, H heads, D channels, M pools.

    Attributes:
        values: [B, T, H, D] floating.
        chunk_size: The most tokens a pool can have. Without `ranges`, pool m of a row has the tokens from
            `m * chunk_size` on, and there are `ceil(T / chunk_size)` of them.
        lengths: [B] int32, how many tokens of each row count, from the first on; None counts all.
        ranges: [M, 2] int32, with B = 1: the first token of each pool and the token after its last, in 0..T. The pools
            are disjoint and in order: neither column ever decreases.
    """

    values: jax.Array
    chunk_size: int = static()
    lengths: jax.Array | None = None
    ranges: jax.Array | None = None


def accumulator(record: SegmentPooling) -> Any:
    """Returns the dtype of sums: float32, or float64 for float64 values."""
    return jnp.promote_types(record.values.dtype, jnp.float32)


def pool_bounds(record: SegmentPooling) -> tuple[jax.Array, jax.Array]:
    """Returns first token of every pool and the token after its last, both int32 [B|1, M]."""
    if record.ranges is not None:
        return record.ranges[None, :, 0], record.ranges[None, :, 1]
    tokens = record.values.shape[1]
    first = (jnp.arange(cdiv(tokens, record.chunk_size), dtype=jnp.int32) * record.chunk_size)[None]
    end = jnp.int32(tokens) if record.lengths is None else record.lengths[:, None]
    return jnp.minimum(first, end), jnp.minimum(first + record.chunk_size, end)


def chunk_ranges(cum_seqlens: jax.Array, chunk_size: int, total: int) -> jax.Array:
    """Returns packed sequences cut into chunks, each from its own first token on: the `ranges` of their pools.

    Args:
        cum_seqlens: [N + 1] int, may be traced; sequence n owns tokens `cum_seqlens[n] : cum_seqlens[n + 1]`.
        chunk_size: Tokens per chunk; the last one of a sequence may have fewer.
        total: Tokens in the row.

    Returns:
        [M, 2] int32, with M the most chunks that N such sequences can have. Those that there are come first, in the
        order of their sequences; the others are empty.
    """
    bounds = cum_seqlens.astype(jnp.int32)
    sequences = bounds.shape[0] - 1
    most = min(total, (total + sequences * (chunk_size - 1)) // chunk_size)
    last = jnp.cumsum(cdiv(jnp.diff(bounds), chunk_size), dtype=jnp.int32)  # chunks up to and with each sequence
    chunk = jnp.arange(most, dtype=jnp.int32)
    sequence = jnp.minimum(jnp.searchsorted(last, chunk, side="right").astype(jnp.int32), sequences - 1)
    sequence_end = bounds[sequence + 1]
    before = jnp.where(sequence > 0, last[sequence - 1], 0)
    first = jnp.minimum(bounds[sequence] + (chunk - before) * chunk_size, sequence_end)
    return jnp.stack([first, jnp.minimum(first + chunk_size, sequence_end)], axis=1)
