"""Sequences with many query tokens: flash attention's kernel, whose keys and values lie in pages.

A work tile has 128 query tokens of one sequence and one head, as in flash attention, where the decoding kernel has all
query heads of a KV head: with that many tokens keys are read often enough from L2, and two warpgroups overlap products
with exponentials. The rows of a tile are gathered by XLA, so that each tile begins where copies can.

    tokens   | sequence 0 ....... | 1 | sequence 2 ............. |      1 has few tokens: the decoding kernel's
    tiles    | 128 | 128 | 70     |   | 128 | 128 | 128 | 9      |      longest first, those without rows never
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import sequential_vmap

from ejkernel.families.paged_attention import PagedAttention, band
from ejkernel.planning import paged_cache
from ejkernel_pallas.gpu.hopper import tile_scheduler
from ejkernel_pallas.gpu.hopper.registers import as_int32
from ejkernel_pallas.gpu.latent_attention.spec import GROUP, UNIT
from ejkernel_pallas.gpu.paged_attention.producer import cache_index
from ejkernel_pallas.gpu.paged_attention.spec import PagedSpec
from ejkernel_pallas.gpu.tiled_attention.forward.call import KeyLimits
from ejkernel_pallas.gpu.tiled_attention.forward.run import run_plan
from ejkernel_pallas.gpu.tiled_attention.spec import HopperSpec
from ejkernel_pallas.gpu.tiled_attention.tiles import HopperForward, forward_tile

I32 = jnp.int32
TILE = 128
"""Query tokens of a work tile."""
SEQUENCE, POSITION, LOW, KEYS = range(4)
"""Columns of an operand's `items`: `KeyLimits` of a tile behind its sequence."""
STAGES = 2
"""Blocks of keys, and of values, in shared memory."""
OPERANDS = ("q", "k", "v", "tables", "table", "items", "live")
"""Operands of the kernel, in the order in which `prefill` passes them."""
COLUMNS_OF_EIGHT = 2
"""Columns that a thread has of eight of a tile of scores, and so the bits of eight keys in a word."""


@dataclasses.dataclass(frozen=True)
class PagedKeys:
    """`KeyPages` of a cache.

    Attributes:
        spec: How the cache lies.
    """

    spec: PagedSpec

    @property
    def copies(self) -> int:
        """A copy a page, or a part of one."""
        return UNIT // self.spec.copied

    def live(self, operands: dict[str, Any]) -> Any:
        """All heads' tiles that have query tokens."""
        return operands["live"][0]

    def limits(self, operands: dict[str, Any], tile: Any) -> KeyLimits:
        """The keys of a tile."""
        position, low, keys = (operands["items"][tile, n] for n in (POSITION, LOW, KEYS))
        return KeyLimits(position, low, keys)

    def find(self, operands: dict[str, Any], tile: Any, block: Any) -> tuple[Any, Any]:
        """Page and slot of every copy of a block, and the word of the keys that are there.

        The page of an absent one is the number of pages: copies from beyond an array's end write zeros.
        """
        spec, key = self.spec, block * UNIT
        sequence, keys = operands["items"][tile, SEQUENCE], operands["items"][tile, KEYS]
        if spec.columns == 0:
            # All bits set: keys behind the last one are masked by their number.
            return [(sequence, key)], I32(-1)
        word, places = I32(0), []
        bits = COLUMNS_OF_EIGHT * (spec.copied // GROUP)
        for first in range(0, UNIT, spec.copied):
            column = lax.div(key + first, I32(spec.page_size))
            # Behind the table's end its last entry is read; `there` is false for it.
            page = operands["tables"][sequence, jnp.minimum(column, spec.columns - 1)]
            there = (key + first < keys) & (page >= 0) & (page < spec.pages)
            places.append((jnp.where(there, page, spec.pages), lax.rem(key + first, I32(spec.page_size))))
            ones = as_int32(((1 << bits) - 1) << (COLUMNS_OF_EIGHT * (first // GROUP)))
            word = word | jnp.where(there, I32(ones), I32(0))
        return places, word

    def copy(self, operands: dict[str, Any], what: str, places: Any, head: Any, target: Any, full: Any) -> None:
        """Copies a block page by page."""
        rows, component = self.spec.copied, ("k", "v").index(what)
        for number, (page, slot) in enumerate(places):
            index, column = cache_index(self.spec, page, head, component)
            source = operands[what].at[index, pl.ds(slot, rows), pl.ds(column, target.shape[1])]
            plgpu.copy_gmem_to_smem(source, target.at[pl.ds(number * rows, rows)], full)


class Prefill(NamedTuple):
    """The work of the kernel, tiles in the order in which blocks take them.

    Attributes:
        items: [W, 4] int32: sequence, position of the first token, first key, one more than the last key.
        table: [1, W, 4] int32, ranges of key blocks, as `tile_scheduler.block_range` reads them.
        live: [1] int32, work tiles of all heads that have tokens.
        tokens: [W * 128] int32, the query row of every row.
        rows: [T] int32, the row of every query row; behind the last one where its sequence has no tiles.
    """

    items: jax.Array
    table: jax.Array
    live: jax.Array
    tokens: jax.Array
    rows: jax.Array


def prefill(
    record: PagedAttention, spec: PagedSpec, lengths: paged_cache.RowLimits, cache: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, jax.Array]:
    """Output [T, H, Dv] and lse [T, H] of the sequences with so many query rows; 0 and -inf in other rows.

    Args:
        record: The canonical arguments, without new tokens.
        spec: How the cache lies.
        lengths: Query rows of the sequences.
        cache: Keys and values as three axes, as `PagedKeys` reads them.
    """
    plan, kernel_spec = make_prefill(record, lengths), _flash_spec(record, spec)
    kernel_spec = dataclasses.replace(kernel_spec, queries=plan.tokens.shape[0])
    tables = jnp.zeros((1, 1), I32) if record.block_tables is None else record.block_tables.astype(I32)
    run = sequential_vmap(functools.partial(_launch, kernel_spec, spec))
    query = record.query[plan.tokens][None]
    output, lse = run(query, *cache, tables, plan.table, plan.items, plan.live)
    # Behind the last row of all tiles: tokens of sequences that have none.
    output = output[0].at[plan.rows].get(mode="fill", fill_value=0)
    return output, lse[0].T.at[plan.rows].get(mode="fill", fill_value=-jnp.inf)


def make_prefill(record: PagedAttention, lengths: paged_cache.RowLimits) -> Prefill:
    """The work tiles of the sequences with so many query rows."""
    tiles = paged_cache.query_tiles(record, TILE, lengths=lengths)
    low, keys, table = _key_blocks(record, tiles)
    # The longest first, so that no block is left with a long tile at the end; those without rows come last.
    order = jnp.argsort(jnp.where(tiles.rows > 0, table[:, 0] - table[:, 3], 1), stable=True)
    place = jnp.zeros_like(order).at[order].set(jnp.arange(order.shape[0], dtype=order.dtype))
    begins, rows_of = paged_cache.query_ranges(record)
    count = record.query.shape[0]
    tokens = (begins[tiles.sequence] + tiles.skipped)[order][:, None] + jnp.arange(TILE, dtype=I32)
    sequence, _ = paged_cache.token_places(record)
    owner = jnp.maximum(sequence, 0)
    offset = jnp.arange(count, dtype=I32) - begins[owner]
    tile_of = jnp.minimum(tiles.first[owner] + offset // TILE, order.shape[0] - 1)
    has_tile = (sequence >= 0) & (rows_of[owner] >= lengths.least)
    return Prefill(
        items=jnp.stack((tiles.sequence, tiles.position, low, keys), axis=1)[order].astype(I32),
        table=table[order][None].astype(I32),
        live=(tiles.total * record.query.shape[1])[None].astype(I32),
        tokens=jnp.minimum(tokens.reshape(-1), count - 1),
        rows=jnp.where(has_tile, place[tile_of] * TILE + offset % TILE, order.shape[0] * TILE).astype(I32),
    )


def _key_blocks(record: PagedAttention, tiles: paged_cache.QueryTiles) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The first key of each tile, one more than its last, and its ranges of blocks [W, 4], as `Prefill.table` has."""
    owner, (left, right) = tiles.sequence, band(record)
    keys = jnp.minimum(record.kv_lens.astype(I32)[owner], paged_cache.capacity(record))
    if right is not None:
        keys = jnp.minimum(keys, tiles.position + tiles.rows + right)
    start = jnp.zeros_like(keys) if record.kv_starts is None else record.kv_starts.astype(I32)[owner]
    low = jnp.maximum(start if left is None else jnp.maximum(start, tiles.position - left), 0)
    keys = jnp.where((tiles.rows > 0) & (keys > low), keys, 0)
    low = jnp.where(keys > 0, low, 0)
    first, stop = low // UNIT, jnp.maximum(-(-keys // UNIT), low // UNIT + 1)
    # Full blocks: all 128 rows attend all keys, those of the first row's right end and of the last row's left one.
    begin = start if left is None else jnp.maximum(start, tiles.position + TILE - 1 - left)
    end = keys if right is None else jnp.minimum(keys, tiles.position + right + 1)
    full_end = jnp.clip(end // UNIT, first, stop)
    # No further than full blocks end: the kernel masks blocks before `full_start` at their lower end alone.
    full_start = jnp.clip(-(-begin // UNIT), first, full_end)
    # A page that is absent masks its keys, which full blocks do not.
    holes = _has_holes(record)[owner]
    full_start, full_end = jnp.where(holes, first, full_start), jnp.where(holes, first, full_end)
    return low, keys, jnp.stack((first, full_start, full_end, stop), axis=1)


def _has_holes(record: PagedAttention) -> jax.Array:
    """Whether pages of a sequence's keys are absent, bool [N]."""
    if record.block_tables is None:
        return jnp.zeros(record.kv_lens.shape, bool)
    pages, slots = record.block_tables, paged_cache.page_size(record)
    used = jnp.arange(pages.shape[1], dtype=I32) * slots < record.kv_lens.astype(I32)[:, None]
    return jnp.any(used & ((pages < 0) | (pages >= paged_cache.page_count(record))), axis=1)


def _flash_spec(record: PagedAttention, spec: PagedSpec) -> HopperSpec:
    left, right = band(record)
    return HopperSpec(
        batch=1,
        queries=0,
        keys=paged_cache.capacity(record),
        heads=record.query.shape[1],
        kv_heads=spec.tiles,
        head_dim=spec.key_dim,
        value_dim=spec.value_dim,
        dtype=spec.dtype,
        scale=record.softmax_scale,
        soft_cap=None,
        left=left,
        right=right,
        segments=False,
        pattern=False,
        sinks=False,
        threshold=0,
        dropout_scale=record.value_scale,
        pages=True,
        key_starts=record.kv_starts is not None,
    )


def _launch(spec: HopperSpec, layout: PagedSpec, *arrays: jax.Array) -> tuple[jax.Array, ...]:
    """Outputs [1, W * 128, H, Dv] and lse [1, H, W * 128]."""
    operands: dict[str, jax.Array] = dict(zip(OPERANDS, arrays, strict=True))
    tile = forward_tile(HopperForward(block_q=TILE, block_kv=UNIT, stages=STAGES), spec)
    # All heads are one bundle, so that tiles are in order over all of them and the live ones come first.
    plan = tile_scheduler.make_plan(
        operands["table"].shape[1],
        batch=1,
        heads=spec.heads,
        reverse=False,
        head_bytes=1,
        group=spec.group_size,
        persistent=True,
    )
    return run_plan(spec, tile, plan, operands, 1, PagedKeys(layout))
