"""Forward pass of paged attention in Triton."""

import dataclasses

import jax
import jax.numpy as jnp

from ejkernel.families.paged_attention import PagedAttention, qq_starts
from ejkernel.families.paged_attention import pages as paged_cache
from ejkernel.families.paged_attention.latent_pages import Rotary, rotary_of
from ejkernel.planning.softmax_merge import Partial, merge
from ejkernel_triton.launch import Shape, launch
from ejkernel_triton.paged_attention.config import PagedForward
from ejkernel_triton.paged_attention.plan import Prefix, plan_work, prefix_config, spec_of_work, split_prefix
from ejkernel_triton.paged_attention.spec import PagedSpec, WriteSpec, strides_of
from ejkernel_triton.sizes import padded_for_dot

MERGED_NUMBERS = 2048
"""Elements that a program of one warp merges at a time: slots of a row times values."""


def forward(record: PagedAttention, config: PagedForward) -> tuple[tuple[jax.Array, ...], None]:
    """Returns attention output of a record.

    Args:
        record: The canonical arguments.
        config: Tile sizes, programs, warps and stages.

    Returns:
        Output [T, H, Dv] in the query's dtype, lse [T, H] float32 and the updated pages, if any; no residuals.
    """
    prefix = None
    if record.shared_prefix is not None:
        prefix, record = split_prefix(record)
    spec = spec_of_work(record, config, rotary_of(record))
    plan = plan_work(record, spec, config)
    record, pages = write_cache(record, plan[0], config.block_q)
    attended = _zero_outside_sequences(record, *_attend(record, rotary_of(record), spec, plan, config))
    if prefix is not None:
        # After the write, which is in place only if nothing reads the pages as they were.
        keys = dataclasses.replace(prefix.record, key_pages=record.key_pages, value_pages=record.value_pages)
        attended = merge_prefix(_attend_prefix(dataclasses.replace(prefix, record=keys)), attended)
    return (*attended, *pages), None


def attend_pages(record: PagedAttention, config: PagedForward, rotary: Rotary | None) -> tuple[jax.Array, jax.Array]:
    """Returns output and lse of a record without new tokens and without a shared prefix.

    Args:
        record: The record.
        config: Tile sizes, programs, warps and stages.
        rotary: Rotary columns of a latent record.
    """
    spec = spec_of_work(record, config, rotary)
    return _zero_outside_sequences(record, *_attend(record, rotary, spec, plan_work(record, spec, config), config))


def _attend_prefix(prefix: Prefix) -> tuple[jax.Array, jax.Array]:
    """Returns output and lse of all query rows over the keys of the shared prefix."""
    record, config = prefix.record, prefix_config(prefix.record)
    rotary = rotary_of(record)
    spec = spec_of_work(record, config, rotary, row_positions=prefix.positions is not None)
    plan = plan_work(record, spec, config)
    return _zero_outside_sequences(record, *_attend(record, rotary, spec, plan, config, prefix.positions))


def _zero_outside_sequences(record: PagedAttention, output: jax.Array, lse: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns output and lse with 0 and -inf in padding rows, which the work list does not contain."""
    if record.query_start is None:
        return output, lse
    # The rows of all sequences are contiguous.
    live = record.kv_lens.shape[0] if record.num_seqs is None else paged_cache.live_sequences(record)
    token = jnp.arange(record.query.shape[0], dtype=jnp.int32)
    in_sequence = (token >= record.query_start[0]) & (token < record.query_start[live])
    return jnp.where(in_sequence[:, None, None], output, 0), jnp.where(in_sequence[:, None], lse, -jnp.inf)


def _attend(
    record: PagedAttention,
    rotary: Rotary | None,
    spec: PagedSpec,
    plan: tuple[jax.Array, jax.Array],
    config: PagedForward,
    positions: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Returns output and lse of the rows that are in the work list.

    Args:
        record: The record.
        rotary: Rotary columns of a latent record.
        spec: The constants of its kernels.
        plan: Its work list and the programs' shares.
        config: Warps and stages.
        positions: [T, 2] int32, position and context of each query row, where the spec has ROW_POSITIONS.
    """
    from ejkernel_triton.paged_attention.kernels.paged_attention import paged_attention_kernel
    from ejkernel_triton.paged_attention.kernels.split_combine import split_combine_kernel

    # The first axis is the batch, which `jax.vmap` extends.
    row = jax.tree.map(lambda x: x[None], record)
    tables = None if row.block_tables is None else row.block_tables.astype(jnp.int32)
    sinks, slopes = (None if x is None else x.astype(jnp.float32) for x in (row.softmax_aux, row.alibi_slopes))
    rows, heads, _ = record.query.shape
    values = record.key_pages if record.value_pages is None else record.value_pages
    values = values if rotary is None else rotary.rows
    work, shares = plan
    pairs, places = (None if x is None else x[None] for x in (_pair_tables(record), positions))
    # Split-KV: two slots per program, for any lengths; see `paged_attention_kernel`.
    slots, part = 2 * spec.PROGRAMS * spec.SPLITS, spec.BV + (spec.BR if spec.TAIL else 0)
    shapes: tuple[Shape | int, ...] = (
        Shape((1, rows, heads, spec.DV), record.query.dtype),
        Shape((1, rows, heads), jnp.float32),
        Shape((1, slots, spec.M, part), jnp.float32),
        Shape((1, slots, spec.M), jnp.float32),
        Shape((1, slots, spec.M), jnp.float32),
    )
    output, lse, parts, maxima, sums = launch(
        paged_attention_kernel,
        (
            row.query,
            row.key_pages,
            values[None],
            tables,
            work[None],
            shares[None],
            sinks,
            slopes,
            row.qq_bias,
            pairs,
            places,
        ),
        shapes,
        batch=1,
        grid=spec.PROGRAMS * spec.SPLITS,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        constants={"spec": spec},
    )
    # Updates output and lse (inputs 6 and 7) in place, and only rows of split items. One warp: a program has one row of
    # a tile of scores.
    output, lse = launch(
        split_combine_kernel,
        (parts, maxima, sums, work[None], shares[None], sinks, output, lse),
        (6, 7),
        batch=1,
        grid=spec.PROGRAMS * spec.SPLITS * spec.M,
        num_warps=1,
        num_stages=1,
        constants={"spec": spec, "PARTS": max(2, min(16, MERGED_NUMBERS // spec.BV))},
    )
    return output[0], lse[0]


def _pair_tables(record: PagedAttention) -> jax.Array | None:
    """Returns start and rows of each sequence's table in a packed `qq_bias`, [N, 2] int32; None for others."""
    if record.qq_bias is None or record.qq_bias.ndim != 1:
        return None
    rows_of = paged_cache.query_ranges(record)[1]
    starts = qq_starts(record, rows_of)
    assert starts is not None
    # A table that ends past the array, as lengths contradict it, counts as empty.
    fits = starts + rows_of * rows_of <= record.qq_bias.size
    return jnp.stack((starts, jnp.where(fits, rows_of, 0)), axis=1)


def merge_prefix(
    prefix: tuple[jax.Array, jax.Array], suffix: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, jax.Array]:
    """Merges output [T, H, Dv] and lse [T, H] over two sets of keys."""
    parts = [Partial(output.astype(jnp.float32)[None], lse.T[None]) for output, lse in (prefix, suffix)]
    output, lse = merge(*parts)
    return output[0].astype(suffix[0].dtype), lse[0].T


def write_cache(record: PagedAttention, work: jax.Array, block_q: int) -> tuple[PagedAttention, tuple[jax.Array, ...]]:
    """Returns the record with its new tokens in its pages, and those pages; like `paged_cache.write`.

    Args:
        record: The record.
        work: Its work list, [W, fields].
        block_q: Query rows per entry, at most.
    """
    if record.new_keys is None or record.block_tables is None:
        return paged_cache.write(record)
    keys, values = record.new_keys, record.new_values
    if record.value_pages is None:  # a combined cache, or a latent one
        pages = (_write_one(record, keys, values, record.key_pages, work, block_q),)
        written = dataclasses.replace(record, key_pages=pages[0], new_keys=None, new_values=None)
        return written, pages
    assert values is not None
    pages = (
        _write_one(record, keys, None, record.key_pages, work, block_q),
        _write_one(record, values, None, record.value_pages, work, block_q),
    )
    written = dataclasses.replace(record, key_pages=pages[0], value_pages=pages[1], new_keys=None, new_values=None)
    return written, pages


def _write_one(
    record: PagedAttention,
    keys: jax.Array,
    values: jax.Array | None,
    pages: jax.Array,
    work: jax.Array,
    block_q: int,
) -> jax.Array:
    """Writes the tokens into one array of the cache."""
    from ejkernel_triton.paged_attention.kernels.cache_write import cache_write_kernel

    assert record.block_tables is not None
    layout, lanes = record.kv_layout, pages.shape[-1]
    split, second = record.latent or (keys.shape[2], keys.shape[2])
    heads = pages.shape[layout.index("h")] if "h" in layout else 1
    spec = WriteSpec(
        TOKENS=keys.shape[0],
        SEQUENCES=record.kv_lens.shape[0],
        TABLE=record.block_tables.shape[1],
        ENTRIES=work.shape[0],
        BLOCK_Q=block_q,
        HK=keys.shape[1],
        HEADS=heads,
        COMPONENTS=1 if values is None else 2,
        D=keys.shape[2],
        LANES=lanes,
        WIDTH=padded_for_dot(lanes),
        SPLIT=split,
        SECOND=second,
        PAGES=paged_cache.page_count(record),
        PAGE_SIZE=paged_cache.page_size(record),
        STRIDES=strides_of(pages, layout),
        ELEMENTS=pages.size,
    )
    tokens = [None if x is None else x.astype(pages.dtype)[None] for x in (keys, values)]
    (written,) = launch(
        cache_write_kernel,
        (*tokens, work[None], record.block_tables.astype(jnp.int32)[None], pages[None]),
        (4,),
        batch=1,
        grid=spec.ENTRIES * heads * spec.COMPONENTS,
        num_warps=1 if block_q * spec.WIDTH <= 1024 else 4,
        num_stages=1,
        constants={"spec": spec},
    )
    return written[0]
