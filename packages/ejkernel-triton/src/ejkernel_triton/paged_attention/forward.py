"""Forward pass of paged attention in Triton."""

import dataclasses
import math

import jax
import jax.numpy as jnp

from ejkernel.families.paged_attention import PagedAttention, qq_bias_starts
from ejkernel.families.paged_attention import pages as paged_cache
from ejkernel.families.paged_attention.latent_pages import RotaryColumns, rotary_columns_of
from ejkernel.families.paged_attention.shared_prefix import SharedPrefix, split_prefix
from ejkernel.planning.softmax_merge import PartialAttention, merge
from ejkernel_triton.launch import ShapeDtype, launch
from ejkernel_triton.paged_attention.cache_write.spec import make_write_spec
from ejkernel_triton.paged_attention.config import PagedForward
from ejkernel_triton.paged_attention.plan import (
    copy_prefix,
    make_paged_spec,
    plan_work,
    prefix_config,
    should_copy_prefix,
)
from ejkernel_triton.paged_attention.spec import PagedSpec

COMBINE_TILE_ELEMENTS = 2048
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
    spec = make_paged_spec(record, config, rotary_columns_of(record))
    work_plan = plan_work(record, spec, config)
    record, written_pages = write_cache(record, work_plan[0], config.block_q)
    output_and_lse = _zero_outside_sequences(
        record, *_attend_work_items(record, rotary_columns_of(record), spec, work_plan, config)
    )
    if prefix is not None:
        # After the write, which is in place only if nothing reads the pages as they were.
        prefix_record = dataclasses.replace(prefix.record, key_pages=record.key_pages, value_pages=record.value_pages)
        prefix = dataclasses.replace(
            prefix, record=copy_prefix(prefix_record) if should_copy_prefix(prefix_record) else prefix_record
        )
        output_and_lse = merge_prefix(_attend_prefix(prefix), output_and_lse)
    return (*output_and_lse, *written_pages), None


def attend_pages(
    record: PagedAttention, config: PagedForward, rotary: RotaryColumns | None
) -> tuple[jax.Array, jax.Array]:
    """Returns output and lse of a record without new tokens and without a shared prefix.

    Args:
        record: The record.
        config: Tile sizes, programs, warps and stages.
        rotary: Rotary columns of a latent record.
    """
    spec = make_paged_spec(record, config, rotary)
    return _zero_outside_sequences(
        record, *_attend_work_items(record, rotary, spec, plan_work(record, spec, config), config)
    )


def _attend_prefix(prefix: SharedPrefix) -> tuple[jax.Array, jax.Array]:
    """Returns output and lse of all query rows over the keys of the shared prefix."""
    record, config = prefix.record, prefix_config(prefix.record)
    rotary = rotary_columns_of(record)
    spec = make_paged_spec(record, config, rotary, load_row_positions=prefix.row_positions_and_contexts is not None)
    work_plan = plan_work(record, spec, config)
    return _zero_outside_sequences(
        record, *_attend_work_items(record, rotary, spec, work_plan, config, prefix.row_positions_and_contexts)
    )


def _zero_outside_sequences(record: PagedAttention, output: jax.Array, lse: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns output and lse with 0 and -inf in padding rows, which the work list does not contain."""
    if record.query_start is None:
        return output, lse
    # The rows of all sequences are contiguous.
    num_live_sequences = record.kv_lens.shape[0] if record.num_seqs is None else paged_cache.num_live_sequences(record)
    token = jnp.arange(record.query.shape[0], dtype=jnp.int32)
    in_sequence = (token >= record.query_start[0]) & (token < record.query_start[num_live_sequences])
    return jnp.where(in_sequence[:, None, None], output, 0), jnp.where(in_sequence[:, None], lse, -jnp.inf)


def _attend_work_items(
    record: PagedAttention,
    rotary: RotaryColumns | None,
    spec: PagedSpec,
    work_plan: tuple[jax.Array, jax.Array],
    config: PagedForward,
    row_positions_and_contexts: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Returns output and lse of the rows that are in the work list.

    Args:
        record: The record.
        rotary: Rotary columns of a latent record.
        spec: The constants of its kernels.
        work_plan: Its work list and the programs' shares.
        config: Warps and stages.
        row_positions_and_contexts: [T, 2] int32, of each query row, where the spec has LOAD_ROW_POSITIONS.
    """
    from ejkernel_triton.paged_attention.fixed_splits.kernels.fixed_split import fixed_split_kernel
    from ejkernel_triton.paged_attention.kernels.paged_attention import paged_attention_kernel

    # The first axis is the batch, which `jax.vmap` extends.
    batched = jax.tree.map(lambda x: x[None], record)
    work_list, program_shares = (x[None] for x in work_plan)
    sinks, slopes = (None if x is None else x.astype(jnp.float32) for x in (batched.softmax_aux, batched.alibi_slopes))
    bias_tables, row_positions_and_contexts = (
        None if x is None else x[None] for x in (_packed_bias_table_ranges(record), row_positions_and_contexts)
    )
    values = record.key_pages if record.value_pages is None else record.value_pages
    output, lse, *partial_softmaxes = launch(
        fixed_split_kernel if spec.SPLIT_TILES else paged_attention_kernel,
        (
            batched.query,
            batched.key_pages,
            (values if rotary is None else rotary.rows)[None],
            None if batched.block_tables is None else batched.block_tables.astype(jnp.int32),
            *(work_list, program_shares, sinks, slopes),
            *(batched.qq_bias, bias_tables, row_positions_and_contexts),
        ),
        _output_shapes(record, spec),
        batch=1,
        grid=spec.NUM_PROGRAMS * spec.HEAD_TILES_PER_KV_HEAD,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        constants={"spec": spec},
    )
    if not spec.CUTS_ITEMS:
        return output[0], lse[0]
    output, lse = _combine_splits((*partial_softmaxes, work_list, program_shares, sinks, output, lse), spec)
    return output[0], lse[0]


def _output_shapes(record: PagedAttention, spec: PagedSpec) -> tuple[ShapeDtype, ...]:
    """Returns the shapes of output, lse, and the accumulators, row maxima and row sums of partial softmaxes."""
    rows, heads, _ = record.query.shape
    # Split-KV: two slots per program, for any lengths; see `paged_attention_kernel`.
    slots = (1, spec.SLOTS_PER_PROGRAM * spec.NUM_PROGRAMS * spec.HEAD_TILES_PER_KV_HEAD, spec.SLOT_ROWS or spec.M)
    partial_acc_width = spec.BV + (spec.BLOCK_ROTARY if spec.ROTARY_IS_VALUE else 0)
    return (
        ShapeDtype((1, rows, heads, spec.DV), record.query.dtype),
        ShapeDtype((1, rows, heads), jnp.float32),
        ShapeDtype((*slots, partial_acc_width), jnp.float32),
        ShapeDtype(slots, jnp.float32),
        ShapeDtype(slots, jnp.float32),
    )


def _combine_splits(inputs: tuple[jax.Array | None, ...], spec: PagedSpec) -> tuple[jax.Array, ...]:
    """Returns output and lse, which are the last two inputs, with the rows of split items merged.

    Args:
        inputs: The arrays that `split_combine_kernel` reads, in its order.
        spec: Its constants.
    """
    from ejkernel_triton.paged_attention.fixed_splits.kernels.fixed_split_combine import fixed_split_combine_kernel
    from ejkernel_triton.paged_attention.kernels.split_combine import split_combine_kernel

    slots_per_step = max(2, min(16, COMBINE_TILE_ELEMENTS // spec.BV))
    # Updates output and lse (inputs 6 and 7) in place, and only rows of split items. One warp: a program has one row of
    # a tile of scores.
    return launch(
        fixed_split_combine_kernel if spec.SPLIT_TILES else split_combine_kernel,
        inputs,
        (6, 7),
        batch=1,
        grid=spec.NUM_PROGRAMS * spec.HEAD_TILES_PER_KV_HEAD * (spec.SLOT_ROWS or spec.M),
        num_warps=1,
        num_stages=1,
        constants={"spec": spec, "SLOTS_PER_STEP": slots_per_step},
    )


def _packed_bias_table_ranges(record: PagedAttention) -> jax.Array | None:
    """Returns start and rows of each sequence's table in a packed `qq_bias`, [N, 2] int32; None for others."""
    if record.qq_bias is None or record.qq_bias.ndim != 1:
        return None
    rows_per_sequence, num_entries = paged_cache.query_ranges(record)[1], record.qq_bias.size
    starts = qq_bias_starts(record, rows_per_sequence)
    assert starts is not None
    # A table that ends past the array, as lengths contradict it, counts as empty. No square overflows int32: one with
    # more rows than the root of the entries is too large alone. A start that has overflowed stays inside the array.
    max_rows = math.isqrt(num_entries)
    table_size = jnp.minimum(rows_per_sequence, max_rows) ** 2
    fits = (rows_per_sequence <= max_rows) & (starts >= 0) & (starts <= num_entries - table_size)
    return jnp.stack((starts, jnp.where(fits, rows_per_sequence, 0)), axis=1)


def merge_prefix(
    prefix_result: tuple[jax.Array, jax.Array], suffix_result: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, jax.Array]:
    """Merges output [T, H, Dv] and lse [T, H] over two sets of keys."""
    partial_outputs = [
        PartialAttention(output.astype(jnp.float32)[None], lse.T[None])
        for output, lse in (prefix_result, suffix_result)
    ]
    output, lse = merge(*partial_outputs)
    return output[0].astype(suffix_result[0].dtype), lse[0].T


def write_cache(
    record: PagedAttention, work_list: jax.Array, block_q: int
) -> tuple[PagedAttention, tuple[jax.Array, ...]]:
    """Returns the record with its new tokens in its pages, and those pages; like `paged_cache.write_new_tokens`.

    Args:
        record: The record.
        work_list: Its work list, [W, fields].
        block_q: Query rows per entry, at most.
    """
    if record.new_keys is None or record.block_tables is None:
        return paged_cache.write_new_tokens(record)
    keys, values = record.new_keys, record.new_values
    if record.value_pages is None:  # a combined cache, or a latent one
        pages = (_write_cache_array(record, keys, values, record.key_pages, work_list, block_q),)
        written = dataclasses.replace(record, key_pages=pages[0], new_keys=None, new_values=None)
        return written, pages
    assert values is not None
    pages = (
        _write_cache_array(record, keys, None, record.key_pages, work_list, block_q),
        _write_cache_array(record, values, None, record.value_pages, work_list, block_q),
    )
    written = dataclasses.replace(record, key_pages=pages[0], value_pages=pages[1], new_keys=None, new_values=None)
    return written, pages


def _write_cache_array(
    record: PagedAttention,
    keys: jax.Array,
    values: jax.Array | None,
    pages: jax.Array,
    work_list: jax.Array,
    block_q: int,
) -> jax.Array:
    """Writes the tokens into one array of the cache."""
    from ejkernel_triton.paged_attention.cache_write.kernels.cache_write import cache_write_kernel

    assert record.block_tables is not None
    components = (keys,) if values is None else (keys, values)
    spec = make_write_spec(record, components, pages, num_entries=work_list.shape[0], block_q=block_q)
    tokens = [None if x is None else x.astype(pages.dtype)[None] for x in (keys, values)]
    (written,) = launch(
        cache_write_kernel,
        (*tokens, work_list[None], record.block_tables.astype(jnp.int32)[None], pages[None]),
        (4,),
        batch=1,
        grid=spec.NUM_ENTRIES * spec.CACHE_HEADS * spec.KV_COMPONENTS,
        num_warps=1 if block_q * spec.PADDED_ROW_WIDTH <= 1024 else 4,
        num_stages=1,
        constants={"spec": spec},
    )
    return written[0]
