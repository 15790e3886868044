"""Forward pass of segment pooling: sums over chunks of equal size, or over runs of tokens of any length."""

import jax
import jax.numpy as jnp
from jax import lax

from ejkernel.arithmetic import cdiv, is_symbolic
from ejkernel.families.segment_pooling import SegmentPooling, accumulator, pool_bounds
from ejkernel.planning.fixed_tiles import map_tiles, pad_axis
from ejkernel_xla.segment_pooling.config import TokenTiles, block_size, rows_per_step


def forward(record: SegmentPooling, config: TokenTiles) -> tuple[jax.Array, tuple[()]]:
    """Means of a record.

    Args:
        record: The canonical arguments.
        config: Tokens per tile.

    Returns:
        [B, M, H, D] in the values' dtype. There are no residuals.
    """
    if config.batch_invariant:
        return _means_of_pools(record), ()
    if record.ranges is None:
        sums = _chunk_sums(record)
    else:
        sums = _range_sums(record, record.ranges, block_size(record, config))
    return (sums / tokens_per_pool(record)).astype(record.values.dtype), ()


def _means_of_pools(record: SegmentPooling) -> jax.Array:
    """Returns means of a record, [B, M, H, D] in the values' dtype, each pool computed alone by the same program."""
    rows, _, heads, size = record.values.shape
    counts = jnp.broadcast_to(tokens_per_pool(record)[..., 0, 0], (rows, pool_bounds(record)[0].shape[1]))
    pools = {"count": counts.reshape(-1)}
    if record.ranges is None:
        pools["values"] = _chunks(record)
        values = None
    else:
        pools["range"] = record.ranges
        values = record.values.reshape(-1, heads * size)

    def mean(pool: dict[str, jax.Array]) -> jax.Array:
        if values is None:
            total = jnp.sum(pool["values"][0], axis=0, dtype=accumulator(record))
        else:
            first, end = pool["range"][0]
            total = _add_rows(jnp.zeros(values.shape[1], accumulator(record)), values, first, end, 1)
        # Not outside of the loop, where XLA may know the count, and multiply by its inverse.
        return (total / pool["count"]).astype(record.values.dtype)[None]

    return map_tiles(mean, pools, block=1).reshape(*counts.shape, heads, size)


def _chunks(record: SegmentPooling) -> jax.Array:
    """Returns the values of chunks of equal size, zeros after the last of a row, [B * M, chunk_size, H * D]."""
    size, (_, tokens, heads, channels) = record.chunk_size, record.values.shape
    values = pad_axis(_values_within_lengths(record), 1, cdiv(tokens, size) * size - tokens)
    return values.reshape(-1, size, heads * channels)


def _values_within_lengths(record: SegmentPooling) -> jax.Array:
    """Returns the values, 0 for tokens that do not count."""
    values = record.values
    if record.lengths is not None:
        token = jnp.arange(values.shape[1], dtype=jnp.int32)
        values = jnp.where((token < record.lengths[:, None])[..., None, None], values, 0)
    return values


def tokens_per_pool(record: SegmentPooling) -> jax.Array:
    """Returns tokens of every pool, at least 1: [B|1, M, 1, 1]."""
    first, end = pool_bounds(record)
    return jnp.maximum(end - first, 1)[..., None, None].astype(accumulator(record))


def _chunk_sums(record: SegmentPooling) -> jax.Array:
    """Returns sums over chunks of equal size, [B, M, H, D]."""
    values, size = _values_within_lengths(record), record.chunk_size
    rows, tokens, *channels = values.shape
    if is_symbolic(tokens):  # it is not known whether there is a rest
        return jnp.sum(_chunks(record).reshape(rows, -1, size, *channels), axis=2, dtype=accumulator(record))
    whole = tokens // size * size
    chunks = values[:, :whole].reshape(rows, whole // size, size, *channels)
    sums = jnp.sum(chunks, axis=2, dtype=accumulator(record))
    if whole == tokens:
        return sums
    rest = jnp.sum(values[:, whole:], axis=1, keepdims=True, dtype=accumulator(record))
    return jnp.concatenate([sums, rest], axis=1)


def _range_sums(record: SegmentPooling, ranges: jax.Array, size: int) -> jax.Array:
    """Returns sums over runs of any length, [1, M, H, D].

        tokens   |  tile 0  |  tile 1  |  tile 2  |  tile 3  |      sums of all tiles at once
        pool          |-----|==========|==========|---|             tokens, whole tiles, tokens

    Tiles of `size` tokens are summed all at once, wherever pools begin and end. A pool is then the sum of the tiles
    that lie wholly inside of it, and of the tokens before and after these, fewer than `size` on either side.
    """
    _, tokens, *channels = record.values.shape
    values = record.values.reshape(tokens, -1)
    whole, step = tokens // size, rows_per_step(size)
    tiles = jnp.sum(values[: whole * size].reshape(whole, size, -1), axis=1, dtype=accumulator(record))

    def add_pool_sum(m: jax.Array, sums: jax.Array) -> jax.Array:
        first, end = ranges[m, 0], ranges[m, 1]
        first_tile = cdiv(first, size)
        end_tile = jnp.maximum(end // size, first_tile)
        total = _add_rows(sums[m], values, first, jnp.minimum(first_tile * size, end), step)
        total = _add_rows(total, tiles, first_tile, end_tile, step)
        total = _add_rows(total, values, jnp.minimum(end_tile * size, end), end, step)
        return lax.dynamic_update_index_in_dim(sums, total, m, 0)

    sums = jnp.zeros((ranges.shape[0], values.shape[1]), tiles.dtype)
    # Pool by pool, with traced bounds: lengths are values, not shapes.
    sums = lax.fori_loop(jnp.int32(0), jnp.int32(ranges.shape[0]), add_pool_sum, sums)
    return sums.reshape(1, -1, *channels)


def _add_rows(total: jax.Array, rows: jax.Array, first: jax.Array, end: jax.Array, step: int) -> jax.Array:
    """Returns `total` [C] plus the sum of the rows [N, C] from `first` up to `end`, `step` rows at a time."""
    step = min(step, rows.shape[0])

    def add(n: jax.Array, total: jax.Array) -> jax.Array:
        start = first + n * step
        at = jnp.minimum(start, rows.shape[0] - step)  # the last slice is moved back into the array
        row = at + jnp.arange(step, dtype=jnp.int32)
        part = lax.dynamic_slice_in_dim(rows, at, step).astype(total.dtype)
        return total + jnp.sum(jnp.where(((row >= start) & (row < end))[:, None], part, 0), axis=0)

    return lax.fori_loop(jnp.int32(0), cdiv(end - first, step), add, total)
