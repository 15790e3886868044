"""The arrays that the kernel reads: queries head by head, the steps of the grid, and the pages that they copy."""

import dataclasses

import jax
import jax.numpy as jnp

from ejkernel.arithmetic import cdiv
from ejkernel.families.lightning_indexer import LightningIndexer
from ejkernel.planning.page_slots import has_page, rows_of_pages
from ejkernel.types.integers import clamp_to_int32
from ejkernel_pallas.tpu.lightning_indexer_decode.spec import IndexerDecodeSpec
from ejkernel_pallas.tpu.mosaic.vectors import LANES

PREFETCHED_STEPS = 8
"""Steps after the last one whose tables the pipeline of blocks reads."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class GridSteps:
    """The tiles of keys that are read, row after row.

    Attributes:
        num_steps: int32 [], steps of the grid.
        step_rows: int32 [B tiles + 8], the batch row of each step, the last row after the last step.
        step_tiles: int32 [B tiles + 8], the tile of keys of each step.
        first_tiles: int32 [B], the first tile of each row.
        end_tiles: int32 [B], the tile after the last one; a row has at least one tile.
    """

    num_steps: jax.Array
    step_rows: jax.Array
    step_tiles: jax.Array
    first_tiles: jax.Array
    end_tiles: jax.Array


def rows_of_heads(record: LightningIndexer, spec: IndexerDecodeSpec) -> jax.Array:
    """Returns the queries with heads padded, [B, T H, D]. A negative scale turns their signs."""
    query = -record.query if record.softmax_scale < 0 else record.query
    padded = jnp.pad(query, ((0, 0), (0, 0), (0, spec.padded_heads - spec.num_heads), (0, 0)))
    return padded.reshape(padded.shape[0], -1, padded.shape[-1])


def weights_of_heads(record: LightningIndexer, spec: IndexerDecodeSpec) -> jax.Array:
    """Returns the weights times the magnitude of the scale, the same in every lane, [B, T H, 128] float32."""
    weights = record.weights.astype(jnp.float32) * abs(record.softmax_scale)
    padded = jnp.pad(weights, ((0, 0), (0, 0), (0, spec.padded_heads - spec.num_heads)))
    rows = padded.reshape(padded.shape[0], -1, 1)
    return jnp.broadcast_to(rows, (*rows.shape[:2], LANES))


def key_bounds(record: LightningIndexer) -> tuple[jax.Array, jax.Array]:
    """Returns the first key that each query may select and the key after the last one, [B, T] int32."""
    shape = record.query.shape[:2]
    return jnp.broadcast_to(record.key_starts, shape), jnp.broadcast_to(record.key_ends, shape)


def row_bounds(starts: jax.Array, ends: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the first key that a query of each row may select and the key after the last one, [B] int32; 0 twice for
    a row whose queries select nothing.
    """
    has_keys = starts < ends
    end = jnp.max(jnp.where(has_keys, ends, 0), axis=1)
    first = jnp.min(jnp.where(has_keys, starts, end[:, None]), axis=1)
    return first, end


def grid_steps(first_keys: jax.Array, end_keys: jax.Array, spec: IndexerDecodeSpec) -> GridSteps:
    """Returns the steps of the grid for the keys of each row."""
    first = jnp.minimum(first_keys // spec.block_k, spec.num_key_tiles - 1)
    end = jnp.maximum(cdiv(end_keys, spec.block_k), first + 1)
    ends_of_rows = jnp.cumsum(end - first)
    step = jnp.arange(first.shape[0] * spec.num_key_tiles + PREFETCHED_STEPS, dtype=jnp.int32)
    row = jnp.sum(step[:, None] >= ends_of_rows, axis=1, dtype=jnp.int32)
    row = jnp.minimum(row, first.shape[0] - 1)
    tile = jnp.minimum(step - (ends_of_rows - end)[row], spec.num_key_tiles - 1)
    return GridSteps(
        num_steps=ends_of_rows[-1], step_rows=row, step_tiles=tile, first_tiles=first, end_tiles=end.astype(jnp.int32)
    )


def page_tables(
    record: LightningIndexer, first_keys: jax.Array, end_keys: jax.Array, spec: IndexerDecodeSpec
) -> dict[str, jax.Array]:
    """Returns the tables of pages: `page_table`, [B tiles pages] int32, the pages of each row, and -1 for a page
    without keys that a query may select; and `num_copied_pages`, [B tiles] int32, those of each tile that are not -1.
    """
    assert record.block_tables is not None  # the caller has pages
    tables, slots = clamp_to_int32(record.block_tables), spec.slots_per_page
    start = jnp.arange(tables.shape[1], dtype=jnp.int32) * slots
    is_read = (start < end_keys[:, None]) & (start + slots > first_keys[:, None])
    tables = jnp.where(is_read & has_page(tables, record.key.shape[0]), tables, -1)
    padding = spec.num_key_tiles * spec.pages_per_tile - tables.shape[1]
    tables = jnp.pad(tables, ((0, 0), (0, padding)), constant_values=-1).reshape(-1, spec.pages_per_tile)
    counts = jnp.sum(tables >= 0, axis=1, dtype=jnp.int32)
    return {"page_table": tables.reshape(-1), "num_copied_pages": counts}


def scales_of_keys(record: LightningIndexer) -> jax.Array:
    """Returns the factors of the keys, [B, 1, S] float32; those in pages are gathered, 4 bytes for each key."""
    assert record.key_scales is not None  # the caller has scales
    scales = record.key_scales.astype(jnp.float32)
    return (scales if record.block_tables is None else rows_of_pages(scales, record.block_tables))[:, None]
