"""Forward pass of paged attention on Hopper."""

import dataclasses
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax.custom_batching import sequential_vmap

from ejkernel.families.paged_attention import PagedAttention
from ejkernel.families.paged_attention import pages as paged_cache
from ejkernel.families.paged_attention.pages import COMBINED_LAYOUT
from ejkernel_pallas.gpu.hopper.fixed_splits import thread_tile_shape
from ejkernel_pallas.gpu.hopper.launch import launch, wgmma_operand_smem
from ejkernel_pallas.gpu.hopper.sizes import WGMMA_M
from ejkernel_pallas.gpu.latent_attention.kernels.split_combine import KernelOutputs, combine_partial_results
from ejkernel_pallas.gpu.latent_attention.plan import LatentSchedule
from ejkernel_pallas.gpu.latent_attention.spec import KEYS_PER_STEP
from ejkernel_pallas.gpu.paged_attention.config import HopperPaged
from ejkernel_pallas.gpu.paged_attention.kernels.call import Call, SharedMemory
from ejkernel_pallas.gpu.paged_attention.kernels.fixed_split_combine import combine_splits
from ejkernel_pallas.gpu.paged_attention.kernels.paged_decode import MASKED_SCORE, paged_kernel
from ejkernel_pallas.gpu.paged_attention.kernels.paged_prefill import prefill
from ejkernel_pallas.gpu.paged_attention.plan.decode import make_schedule
from ejkernel_pallas.gpu.paged_attention.spec import PagedSpec, make_spec, with_items

OPERAND_NAMES: tuple[str, ...] = ("query", "keys", "values", "tables", "items", "shares")
"""Operands of the kernel, in the order in which `attend` passes them."""


def forward(record: PagedAttention, params: HopperPaged) -> tuple[tuple[jax.Array, ...], None]:
    """Returns attention over pages of keys and values.

    Args:
        record: The canonical arguments.
        params: Programs and stages.

    Raises:
        ValueError: The configuration has no program or no stage.

    Returns:
        Output [T, H, Dv] in the query's dtype, lse [T, H] float32 and the updated pages, if any; no residuals.
    """
    record, pages = paged_cache.write_new_tokens(record)
    output, lse = attend(record, params)
    return (output, lse, *pages), None


def attend(record: PagedAttention, params: HopperPaged) -> tuple[jax.Array, jax.Array]:
    """Returns output [T, H, Dv] and lse [T, H] of a record without new tokens.

    The decode kernel serves sequences with few query tokens, `prefill` all others.
    """
    spec, cache, count = make_spec(record, params), _cache_views(record), record.query.shape[0]
    if record.query_start is None or count < params.prefill_tokens:
        tiles = paged_cache.query_tiles(record, spec.tokens_per_tile)
        spec = with_items(record, spec, len(tiles.sequence))
        output, lse = _run_decode_items(record, spec, make_item_schedule(record, spec, tiles), cache)
        if spec.queries_in_place:
            return output.reshape(count, -1, spec.value_dim), lse.reshape(count, -1)
        return _outputs_by_query_row(record, spec, tiles, output, lse)
    prefill_limits = paged_cache.QueryRowLimits(params.prefill_tokens, count)
    output, lse = prefill(record, spec, prefill_limits, cache)
    tokens, *few = _attend_short_sequences(
        record, spec, cache, paged_cache.QueryRowLimits(1, params.prefill_tokens - 1)
    )
    # The prefill's results of all tokens are in order; those of sequences with few tokens are overwritten.
    results, sums = (x.at[tokens].set(y, mode="drop") for x, y in zip((output, lse), few, strict=True))
    return results, sums


def _attend_short_sequences(
    record: PagedAttention,
    spec: PagedSpec,
    cache: tuple[jax.Array, jax.Array],
    sequence_row_limits: paged_cache.QueryRowLimits,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns query rows, output and lse of the sequences with few tokens; missing tokens have rows past the end.

    Their queries are gathered tile by tile, so that the work does not depend on the tokens of other sequences.
    """
    tiles, heads = (
        paged_cache.query_tiles(record, spec.tokens_per_tile, lengths=sequence_row_limits),
        record.query.shape[1] // spec.tiles_per_item,
    )
    (count,), tokens = tiles.sequence.shape, spec.tokens_per_tile
    number = jnp.arange(tokens, dtype=jnp.int32)
    row = (paged_cache.query_ranges(record)[0][tiles.sequence] + tiles.row_offset)[:, None] + number
    row = jnp.where(number < tiles.rows[:, None], row, record.query.shape[0]).reshape(-1)
    queries = record.query.at[row].get(mode="fill", fill_value=0)
    gathered = dataclasses.replace(record, query=queries)
    spec = dataclasses.replace(
        with_items(record, spec, count), query_rows_per_kv_head=count * tokens * spec.rows_per_token + WGMMA_M
    )
    output, lse = _run_decode_items(gathered, spec, make_item_schedule(record, spec, tiles, tokens), cache)

    def rows_by_token(x: jax.Array) -> jax.Array:
        # [items, Hk * 64, ...]: the rows of a tile are its tokens, each with its query heads and padding rows.
        x = x.reshape(count, spec.tiles_per_item, WGMMA_M, -1)[:, :, : tokens * spec.rows_per_token]
        x = x.reshape(count, spec.tiles_per_item, tokens, spec.rows_per_token, -1)[:, :, :, :heads]
        return x.swapaxes(1, 2).reshape(count * tokens, spec.tiles_per_item * heads, -1)

    output, lse = rows_by_token(output), rows_by_token(lse)[..., 0]
    attends = lse > MASKED_SCORE / 2
    return row, jnp.where(attends[..., None], output, 0), jnp.where(attends, lse, -jnp.inf)


def make_item_schedule(
    record: PagedAttention, spec: PagedSpec, tiles: paged_cache.QueryTiles, gathered_tokens_per_tile: int = 0
) -> LatentSchedule:
    """Returns the items of a record, and the programs' shares of steps, or of splits."""
    cuts_items = not spec.split_keys or spec.slots_per_segment > 0
    return make_schedule(
        record, tiles, spec.programs_per_kv_head, gathered_tokens_per_tile, spec.keys_per_unit, spec.splits, cuts_items
    )


def _run_decode_items(
    record: PagedAttention, spec: PagedSpec, schedule: LatentSchedule, cache: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, jax.Array]:
    """Returns the decode kernel's output and lse: of all rows in place, or of 64 rows per item and KV head."""
    tables = jnp.zeros((1, 1), jnp.int32) if record.block_tables is None else record.block_tables.astype(jnp.int32)

    @sequential_vmap
    def run(*arrays: jax.Array) -> tuple[jax.Array, ...]:
        operands: dict[str, jax.Array] = dict(zip(OPERAND_NAMES, arrays, strict=True))
        if spec.split_keys:
            return combine_splits(spec, LatentSchedule(*arrays[-2:]), _launch(spec, operands))
        return combine_partial_results(spec, LatentSchedule(*arrays[-2:]), KernelOutputs(*_launch(spec, operands)))

    query = record.query.reshape(-1, spec.key_dim) if spec.queries_in_place else _padded_query_rows(record, spec)
    output, lse = run(query, *cache, tables, *schedule)
    return output, lse


def _cache_views(record: PagedAttention) -> tuple[jax.Array, jax.Array]:
    """Returns keys and values as arrays of three axes, without moving data.

    A combined cache has pages, slots and all elements of a slot; other caches have pages, slots and all heads of a
    slot, or all heads of all pages, slots and a head.
    """
    caches = record.key_pages, record.key_pages if record.value_pages is None else record.value_pages
    if record.kv_layout in (COMBINED_LAYOUT, "pshd"):
        keys, values = (pages.reshape(*pages.shape[:2], -1) for pages in caches)
    else:
        keys, values = (pages.reshape(-1, *pages.shape[2:]) for pages in caches)
    return keys, values


def _padded_query_rows(record: PagedAttention, spec: PagedSpec) -> jax.Array:
    """Returns [Hk * query_rows, D]: for each KV head the rows of all tokens, followed by a tile of zeros."""
    tokens, _, size = record.query.shape
    # The heads of a KV head are contiguous, so that 64 of its rows are consecutive tokens, and one copy takes them.
    # With the zeros, a tile that starts at the last token can also read 64 rows.
    rows = record.query.reshape(tokens, spec.tiles_per_item, -1, size).swapaxes(0, 1)
    rows = jnp.pad(rows, ((0, 0), (0, 0), (0, spec.rows_per_token - rows.shape[2]), (0, 0)))
    rows = rows.reshape(spec.tiles_per_item, tokens * spec.rows_per_token, size)
    return jnp.pad(rows, ((0, 0), (0, WGMMA_M), (0, 0))).reshape(-1, size)


def _outputs_by_query_row(
    record: PagedAttention, spec: PagedSpec, tiles: paged_cache.QueryTiles, output: jax.Array, lse: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Returns output and lse by query row, from those by item: [items, Hk * 64, Dv] and [items, Hk * 64]."""
    sequence, _ = paged_cache.token_sequences_and_positions(record)
    owner, token = jnp.maximum(sequence, 0), jnp.arange(record.query.shape[0], dtype=jnp.int32)
    offset = token - paged_cache.query_ranges(record)[0][owner]
    item, row = tiles.first[owner] + offset // spec.tokens_per_tile, offset % spec.tokens_per_tile * spec.rows_per_token
    rows = row[:, None] + jnp.arange(
        record.query.shape[1] // spec.tiles_per_item, dtype=jnp.int32
    )  # [T, heads of a KV head]
    # Gathered by XLA: the kernel writes 64 rows per item for any number of tokens, so items overwrite no rows of
    # others.
    place = (
        item[:, None, None] * spec.tiles_per_item + jnp.arange(spec.tiles_per_item, dtype=jnp.int32)[:, None]
    ) * WGMMA_M
    place = (place + rows[:, None]).reshape(token.shape[0], -1)  # [T, H]
    output, lse = output.reshape(-1, spec.value_dim)[place], lse.reshape(-1)[place]
    # A row that attends to nothing has a maximum of about MASKED_SCORE, whatever its output is.
    attends = (sequence >= 0)[:, None] & (lse > MASKED_SCORE / 2)
    return jnp.where(attends[..., None], output, 0), jnp.where(attends, lse, -jnp.inf)


def _launch(spec: PagedSpec, operands: dict[str, jax.Array]) -> tuple[jax.Array, ...]:
    """Returns the outputs of whole items and the partial results of split items."""

    def body(operand_refs: dict[str, Any], output_refs: Any, buffers: dict[str, Any]) -> None:
        counters = (spec.num_items * spec.tiles_per_item,)
        arrivals = pl.get_global(plgpu.SemaphoreType.REGULAR(counters)) if spec.counts_arrivals else None
        paged_kernel(Call(spec, operand_refs, output_refs, SharedMemory(**buffers), arrivals))

    parts, tiles = 2 * spec.num_thread_blocks, spec.num_items * spec.tiles_per_item
    part_shapes = [(parts, WGMMA_M, spec.value_dim), (parts, WGMMA_M)]
    if spec.split_keys:  # accumulator, maximum and sum of each split of the items that are cut
        # A slot is read and written as 64 rows, of which only `slot_rows` are touched: the last one needs room.
        rows = spec.num_slots * spec.slot_rows + WGMMA_M - spec.slot_rows
        part_shapes = [(rows, spec.value_dim), *[(spec.num_slots, WGMMA_M)] * 2]
    rows = spec.num_items * spec.tiles_per_item * spec.heads_per_tile if spec.queries_in_place else tiles * WGMMA_M
    # Flat if rows are folded one by one.
    lse_shape = (rows,) if spec.split_keys else (tiles, WGMMA_M)
    outputs = [
        jax.ShapeDtypeStruct((rows, spec.value_dim), spec.dtype),
        jax.ShapeDtypeStruct(lse_shape, jnp.float32),
        *(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in part_shapes),
    ]
    return launch(body, operands, outputs, _scratch(spec), spec.num_thread_blocks, 1)


def _scratch(spec: PagedSpec) -> dict[str, Any]:
    """Returns shared memory and mbarriers, by the names of `SharedMemory`."""
    copies, stages, barrier = KEYS_PER_STEP // spec.slots_per_copy, spec.stages, plgpu.Barrier
    split_buffers: dict[str, Any] = {}
    if spec.split_keys:
        split_buffers["split_total"] = plgpu.SMEM(thread_tile_shape(spec.value_dim, spec.slot_rows), jnp.float32)
    if spec.counts_arrivals:
        split_buffers["arrivals_before"] = plgpu.SMEM((1,), jnp.int32)
    return split_buffers | {
        "q": wgmma_operand_smem((WGMMA_M, spec.key_dim), spec.dtype),
        "k": wgmma_operand_smem((stages, KEYS_PER_STEP, spec.key_dim), spec.dtype),
        "v": wgmma_operand_smem((stages, KEYS_PER_STEP, spec.value_dim), spec.dtype),
        "valid_key_bits": plgpu.SMEM((stages,), jnp.int32),
        "q_full": barrier(num_arrivals=1),
        "q_free": barrier(num_arrivals=1),
        # One copy per page, and one more arrival for the bits in `valid_key_bits`.
        "k_full": barrier(num_arrivals=copies + 1, num_barriers=stages),
        "k_free": barrier(num_arrivals=1, num_barriers=stages),
        "v_full": barrier(num_arrivals=copies, num_barriers=stages),
        "v_free": barrier(num_arrivals=1, num_barriers=stages),
    }
