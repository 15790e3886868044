"""The work list of a call and the programs' shares of it; and the copy of a shared prefix in the query's dtype."""

import dataclasses

import jax
import jax.numpy as jnp

from ejkernel.arithmetic import cdiv
from ejkernel.families.paged_attention import PagedAttention
from ejkernel.families.paged_attention import pages as paged_cache
from ejkernel.families.paged_attention.latent_pages import RotaryColumns
from ejkernel.families.paged_attention.work import KeyTileRanges, WorkList, distribute_key_tiles, make_work_list
from ejkernel.ops.device import current_device
from ejkernel_triton.launch import ShapeDtype, is_interpreting, launch
from ejkernel_triton.paged_attention.config import PREFILL_SCORE_ROWS, PagedForward, heuristic
from ejkernel_triton.paged_attention.spec import PagedSpec, make_spec
from ejkernel_triton.sizes import pad_to_dot_size

FIELDS_PER_ENTRY = 9
"""Fields of an entry of the work list; `tile` names them."""

MAX_PLANNED_ENTRIES = 8192
"""The largest number of entries or sequences that one program can plan; XLA plans more."""


def make_paged_spec(
    record: PagedAttention, config: PagedForward, rotary: RotaryColumns | None, load_row_positions: bool = False
) -> PagedSpec:
    """Returns the constants of a record's kernels, with room for the longest work list."""
    sequences = record.kv_lens.shape[0]
    # An upper bound on the entries: each sequence may have one partial tile.
    tiles = record.query.shape[0] // config.block_q + sequences
    entries = sequences if record.query_start is None else tiles
    return make_spec(record, config, entries, rotary, load_row_positions)


def plan_work(record: PagedAttention, spec: PagedSpec, config: PagedForward) -> tuple[jax.Array, jax.Array]:
    """Returns the work list in the kernels' layout, [W, fields], and the programs' starts, [P + 1, 2]; see
    `work_list_kernel`. In a `batch_invariant` block, splits take the place of key tiles.
    """
    if spec.SPLIT_TILES:
        keys = spec.SPLIT_TILES * spec.BLOCK_KV
        spec, config = dataclasses.replace(spec, BLOCK_KV=keys), dataclasses.replace(config, block_kv=keys)
    if max(spec.NUM_ENTRIES, spec.NUM_SEQUENCES) > MAX_PLANNED_ENTRIES:
        if spec.LOAD_ROW_POSITIONS:
            record = dataclasses.replace(record, causal=False, sliding_window=None, chunk_size=None)
        work = make_work_list(record, config.block_q)
        schedule = distribute_key_tiles(work, config.block_kv, spec.HK, config.num_programs)
        return _stack_work_entries(work, schedule), _stack_program_shares(schedule)
    from ejkernel_triton.paged_attention.kernels.work_list import work_list_kernel

    work_arrays = (record.kv_lens, record.query_start, record.kv_starts, paged_cache.num_live_sequences(record))
    int_arrays = [None if x is None else x.astype(jnp.int32).reshape(1, -1) for x in work_arrays]
    shapes = (
        ShapeDtype((1, spec.NUM_ENTRIES, FIELDS_PER_ENTRY), jnp.int32),
        ShapeDtype((1, spec.NUM_PROGRAMS + 1, 2), jnp.int32),
    )
    padded_sizes = {
        "PADDED_NUM_SEQUENCES": spec.NUM_SEQUENCES,
        "PADDED_NUM_ENTRIES": spec.NUM_ENTRIES,
        "PADDED_NUM_PROGRAMS": spec.NUM_PROGRAMS,
    }
    constants = {name: pad_to_dot_size(size) for name, size in padded_sizes.items()}
    work_list, program_shares = launch(
        work_list_kernel,
        int_arrays,
        shapes,
        batch=1,
        grid=1,
        num_warps=4 if max(constants.values()) <= 1024 else 16,
        num_stages=1,
        constants={"spec": spec, **constants},
    )
    return work_list[0], program_shares[0]


def _stack_work_entries(work_list: WorkList, key_tile_ranges: KeyTileRanges) -> jax.Array:
    """Returns the work list, computed by XLA."""
    fields = (
        work_list.sequence,
        work_list.row,
        work_list.rows,
        work_list.position,
        work_list.context_length,
        work_list.low,
        work_list.high,
    )
    return jnp.stack((*fields, key_tile_ranges.start, key_tile_ranges.tiles_per_head), axis=1)


def _stack_program_shares(key_tile_ranges: KeyTileRanges) -> jax.Array:
    """Returns the programs' starts and, last, the tiles per share and in total."""
    rows = jnp.stack((key_tile_ranges.entry, key_tile_ranges.begin), axis=1)
    return jnp.concatenate((rows, jnp.stack((key_tile_ranges.tiles_per_program, key_tile_ranges.total))[None]))


MIN_TILES_TO_COPY_PREFIX = 4
"""Tiles of query rows per KV head from which on a prefix of 8 bits is copied in 16 bits."""

MIN_CACHE_PAGES_PER_TABLE_ENTRY = 8
"""A prefix is copied only if the cache has at least this many pages per entry of a table."""


def should_copy_prefix(record: PagedAttention) -> bool:
    """Returns whether the prefix of a record is copied in the query's dtype, in which each of many tiles reads it."""
    tables = record.block_tables
    if tables is None or record.latent is not None:
        return False
    if record.key_pages.dtype.itemsize > 1 or record.query.dtype.itemsize != 2:
        return False
    rows_per_kv_head = record.query.shape[0] * (record.query.shape[1] // paged_cache.kv_heads(record))
    has_many_tiles = is_interpreting() or rows_per_kv_head >= MIN_TILES_TO_COPY_PREFIX * PREFILL_SCORE_ROWS
    # A copy has room for as many tokens as a table, so long tables in a small cache would cost too much memory.
    return has_many_tiles and tables.shape[1] * MIN_CACHE_PAGES_PER_TABLE_ENTRY <= paged_cache.page_count(record)


def copy_prefix(record: PagedAttention) -> PagedAttention:
    """Returns the record of a prefix with a copy of its keys and values in the query's dtype.

    The copy has the pages of the table in their order, and entries that are no page stay such.
    """
    from ejkernel_triton.paged_attention.kernels.prefix_copy import prefix_copy_kernel

    assert record.block_tables is not None
    config = prefix_config(record)
    spec = make_spec(record, config, 1)
    num_pages, tables = record.block_tables.shape[1], record.block_tables.astype(jnp.int32)
    shape = (1, num_pages, spec.PAGE_SIZE, spec.HK)
    values = record.key_pages if record.value_pages is None else record.value_pages
    keys, values = launch(
        prefix_copy_kernel,
        (record.key_pages[None], values[None], tables[None], record.kv_lens.astype(jnp.int32)[None]),
        (ShapeDtype((*shape, spec.D), record.query.dtype), ShapeDtype((*shape, spec.DV), record.query.dtype)),
        batch=1,
        grid=cdiv(num_pages * spec.PAGE_SIZE, spec.BLOCK_KV) * spec.HK,
        num_warps=4,
        num_stages=1,
        constants={"spec": spec},
    )
    is_page = (tables >= 0) & (tables < paged_cache.page_count(record))
    return dataclasses.replace(
        record,
        key_pages=keys[0],
        value_pages=values[0],
        kv_layout="pshd",
        kv_heads=None,
        block_tables=jnp.where(is_page, jnp.arange(num_pages, dtype=jnp.int32), -1),
    )


def prefix_config(record: PagedAttention) -> PagedForward:
    """Returns tile sizes for a prefix: many query rows share its keys, as in a prefill, whatever those of the batch."""
    return heuristic(record, current_device(), "forward")
