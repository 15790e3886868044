"""The segment pooling family: the record its operations lower to and its meaning.

Every pool is a run of tokens of one batch row, given by its first token and the token after its last:

    o_p = (sum of the values of the tokens of pool p) / (number of tokens of pool p)

A pool without tokens is 0, and so is the gradient of a token in no pool. Sums are taken in float32 (float64 for
float64 values).

Source: the compression of keys in blocks of Yuan et al. 2025, arXiv:2502.11089 (native sparse attention), is the mean
over a chunk; the mean over a sequence is the sentence embedding of Reimers & Gurevych 2019, arXiv:1908.10084.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ejkernel.ops.arguments import arguments, static
from ejkernel.ops.model import Family
from ejkernel.planning.requests import PADDING


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
    """The dtype of sums: float32, or float64 for float64 values."""
    return jnp.promote_types(record.values.dtype, jnp.float32)


def spans(record: SegmentPooling) -> tuple[jax.Array, jax.Array]:
    """First token of every pool and the token after its last, both int32 [B|1, M]."""
    if record.ranges is not None:
        return record.ranges[None, :, 0], record.ranges[None, :, 1]
    tokens = record.values.shape[1]
    first = jnp.arange(0, tokens, record.chunk_size, dtype=jnp.int32)[None]
    end = jnp.int32(tokens) if record.lengths is None else record.lengths[:, None]
    return jnp.minimum(first, end), jnp.minimum(first + record.chunk_size, end)


def chunk_ranges(cum_seqlens: jax.Array, chunk_size: int, total: int) -> jax.Array:
    """Packed sequences cut into chunks, each from its own first token on: the `ranges` of their pools.

    Args:
        cum_seqlens: [N + 1] int, may be traced; sequence n owns tokens `cum_seqlens[n] : cum_seqlens[n + 1]`.
        chunk_size: Tokens a chunk; the last one of a sequence may have fewer.
        total: Tokens in the row.

    Returns:
        [M, 2] int32, with M the most chunks that N such sequences can have. Those that there are come first, in the
        order of their sequences; the others are empty.
    """
    bounds = cum_seqlens.astype(jnp.int32)
    sequences = bounds.shape[0] - 1
    most = min(total, (total + sequences * (chunk_size - 1)) // chunk_size)
    last = jnp.cumsum(-(-jnp.diff(bounds) // chunk_size), dtype=jnp.int32)  # chunks up to and with each sequence
    chunk = jnp.arange(most, dtype=jnp.int32)
    sequence = jnp.minimum(jnp.searchsorted(last, chunk, side="right").astype(jnp.int32), sequences - 1)
    behind = bounds[sequence + 1]
    before = jnp.where(sequence > 0, last[sequence - 1], 0)
    first = jnp.minimum(bounds[sequence] + (chunk - before) * chunk_size, behind)
    return jnp.stack([first, jnp.minimum(first + chunk_size, behind)], axis=1)


def reference(record: SegmentPooling) -> tuple[jax.Array, tuple[()]]:
    """The family's meaning in plain jnp, one weight for every pool and token; float64 if values is, else float32.

    Returns:
        [B, M, H, D] in the values' dtype. There are no residuals.
    """
    values, (first, end) = record.values.astype(accumulator(record)), spans(record)
    token = jnp.arange(values.shape[1], dtype=jnp.int32)
    inside = (token >= first[..., None]) & (token < end[..., None])
    inside = jnp.broadcast_to(inside, (values.shape[0], *inside.shape[1:]))
    values = jnp.where(inside.any(axis=1)[..., None, None], values, 0)
    weights = inside / jnp.maximum(end - first, 1)[..., None].astype(values.dtype)
    output = jnp.einsum("bmt,bthd->bmhd", weights, values, precision=lax.Precision.HIGHEST)
    return output.astype(record.values.dtype), ()


def localise(record: SegmentPooling, offsets: Mapping[str, jax.Array]) -> SegmentPooling:
    """One shard's record as it is: rows, heads and channels know nothing of each other."""
    return record


def requests(record: SegmentPooling) -> tuple[dict[str, Any], ...]:
    """The owners of a record's entries: the pools, since none has a token of another."""
    (first, end), token = (np.asarray(x) for x in spans(record)), np.arange(record.values.shape[1])
    rows, pools = record.values.shape[0], first.shape[1]
    first, end = (np.broadcast_to(x, (rows, pools)) for x in (first, end))
    inside = (token >= first[..., None]) & (token < end[..., None])
    pool = np.arange(rows * pools).reshape(rows, pools)
    tokens = np.where(inside.any(axis=1), np.take_along_axis(pool, inside.argmax(axis=1), axis=1), PADDING)
    return ({"b t": tokens, "b p": np.where(inside.any(axis=2), pool, PADDING)},)


FAMILY = Family(
    name="segment_pooling",
    record=SegmentPooling,
    differentiable=("values",),
    dtype=lambda record: record.values.dtype,
    head_dims=lambda record: (record.values.shape[-1],),
    axes={"values": "b t h d", "lengths": "b", "ranges": "p c", "output": "b p h d"},
    shardable="bhd",
    aligned=(),
    localise=localise,
    reference=reference,
    requests=requests,
)
