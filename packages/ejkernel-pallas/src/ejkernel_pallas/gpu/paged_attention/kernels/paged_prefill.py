"""Attention for sequences with many query tokens: flash attention's kernel with keys and values in pages.

A work tile has 128 query rows of one head, as in flash attention, where the decode kernel has all query heads of a KV
head: with many tokens, keys are read from L2 often enough, and two warpgroups overlap products with exponentials.
Queries and outputs are not moved. Copies start at multiples of eight rows, so the first tile of a sequence may start
with rows of the previous one, and its last one end with those of the next: they are computed, but not written.

    rows     | sequence 0 ....... | 1 | sequence 2 ............. | none      1 has few tokens: for the decode kernel
    tiles    | 128 | 128 | 70     |  4 + 124 | 128 | 128 | 5     | 128      padding rows get zeros
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import sequential_vmap

from ejkernel.families.paged_attention import PagedAttention, causal_window_bounds
from ejkernel.families.paged_attention import pages as paged_cache
from ejkernel_pallas.gpu.hopper import tile_scheduler
from ejkernel_pallas.gpu.hopper.launch import pad_rows
from ejkernel_pallas.gpu.hopper.registers import as_int32
from ejkernel_pallas.gpu.hopper.sizes import I32, WGMMA_M
from ejkernel_pallas.gpu.latent_attention.spec import KEYS_PER_STEP, SWIZZLE_ATOM_ROWS
from ejkernel_pallas.gpu.paged_attention.kernels.producer import cache_index_and_column
from ejkernel_pallas.gpu.paged_attention.plan.prefill import (
    NUM_LIVE_TILES_COLUMN,
    PAGED_TILE_COLUMNS,
    QUERY_ROWS_PER_TILE,
    make_prefill_tiles,
)
from ejkernel_pallas.gpu.paged_attention.spec import PagedSpec
from ejkernel_pallas.gpu.tiled_attention.config import HopperForward, forward_tile
from ejkernel_pallas.gpu.tiled_attention.forward import launch_forward_kernel
from ejkernel_pallas.gpu.tiled_attention.kernels.forward_call import PagedTile
from ejkernel_pallas.gpu.tiled_attention.spec import HopperSpec

KEY_BLOCK_STAGES = 2
"""Blocks of keys, and of values, in shared memory."""
OPERAND_NAMES = ("q", "k", "v", "tables", "table")
"""Operands of the kernel, in the order in which `prefill` passes them."""
THREAD_COLUMNS_PER_EIGHT = 2
"""Columns per thread of every eight columns of a tile of scores, and so the bits of eight keys in a word."""


@dataclasses.dataclass(frozen=True)
class PagedKeys:
    """Reads a cache of pages for flash attention's kernel: its `PagedKeyAccess`.

    Attributes:
        spec: Describes the cache's layout.
    """

    spec: PagedSpec

    @property
    def copies_per_block(self) -> int:
        """Returns the number of copies of a block: one per page, or per part of one."""
        return KEYS_PER_STEP // self.spec.slots_per_copy

    def load_num_live_tiles(self, operands: dict[str, Any]) -> Any:
        """Returns the number of tiles with query tokens, over all heads."""
        return operands["table"][0, 0, NUM_LIVE_TILES_COLUMN]

    def load_tile(self, operands: dict[str, Any], number: Any) -> PagedTile:
        """Returns a tile of queries."""
        return PagedTile(
            *(
                operands["table"][0, number, column]
                for column in range(PAGED_TILE_COLUMNS.start, PAGED_TILE_COLUMNS.stop)
            )
        )

    def find_pages(self, operands: dict[str, Any], tile: PagedTile, block: Any) -> tuple[Any, ...]:
        """Returns the page of every copy of a block.

        A missing one gets the number of pages: copies from past an array's end write zeros.
        """
        spec, key = self.spec, block * KEYS_PER_STEP
        if spec.pages_per_table_row == 0:
            return (tile.sequence,)
        pages: list[Any] = []
        for first in range(0, KEYS_PER_STEP, spec.slots_per_copy):
            column = lax.div(key + first, I32(spec.page_size))
            # Past the table's end its last entry is read; `is_valid_page` is false for it.
            page = operands["tables"][tile.sequence, jnp.minimum(column, spec.pages_per_table_row - 1)]
            is_valid_page = (key + first < tile.key_end) & (page >= 0) & (page < spec.num_pages)
            pages.append(jnp.where(is_valid_page, page, spec.num_pages))
        return tuple(pages)

    def valid_key_word(self, pages: tuple[Any, ...]) -> Any:
        """Returns a bit per key of a block, set if it exists."""
        if self.spec.pages_per_table_row == 0:
            # All bits set: keys past the last one are masked by their number.
            return I32(-1)
        valid_key_word, bits = I32(0), THREAD_COLUMNS_PER_EIGHT * (self.spec.slots_per_copy // SWIZZLE_ATOM_ROWS)
        for number, page in enumerate(pages):
            copy_bits = as_int32(((1 << bits) - 1) << (bits * number))
            valid_key_word = valid_key_word | jnp.where(page < self.spec.num_pages, I32(copy_bits), I32(0))
        return valid_key_word

    def copy_block(
        self,
        operands: dict[str, Any],
        operand_name: str,
        pages: tuple[Any, ...],
        block: Any,
        head: Any,
        target: Any,
        full_barrier: Any,
    ) -> None:
        """Copies a block page by page."""
        rows, key_or_value_index = self.spec.slots_per_copy, ("k", "v").index(operand_name)
        for number, page in enumerate(pages):
            slot = block * KEYS_PER_STEP + number * rows
            if self.spec.pages_per_table_row:
                slot = lax.rem(slot, I32(self.spec.page_size))
            index, column = cache_index_and_column(self.spec, page, head, key_or_value_index)
            source = operands[operand_name].at[index, pl.ds(slot, rows), pl.ds(column, target.shape[1])]
            plgpu.copy_gmem_to_smem(source, target.at[pl.ds(number * rows, rows)], full_barrier)


def prefill(
    record: PagedAttention,
    spec: PagedSpec,
    sequence_row_limits: paged_cache.QueryRowLimits,
    cache: tuple[jax.Array, jax.Array],
) -> tuple[jax.Array, jax.Array]:
    """Returns output [T, H, Dv] and lse [T, H] of the sequences with many query rows.

    Padding rows have 0 and -inf; those of other sequences are undefined.

    Args:
        record: The canonical arguments, without new tokens.
        spec: Describes the cache's layout.
        sequence_row_limits: Fewest and most query rows of the sequences.
        cache: Keys and values as three axes, as `PagedKeys` reads them.
    """
    plan, count = make_prefill_tiles(record, sequence_row_limits), record.query.shape[0]
    tables = jnp.zeros((1, 1), I32) if record.block_tables is None else record.block_tables.astype(I32)
    run = sequential_vmap(functools.partial(_launch, _make_flash_spec(record, spec), spec))
    output, lse = run(pad_rows(record.query[None], WGMMA_M), *cache, tables, plan)
    return output[0, :count], lse[0, :, :count].T


def _make_flash_spec(record: PagedAttention, spec: PagedSpec) -> HopperSpec:
    left, right = causal_window_bounds(record)
    return HopperSpec(
        batch_size=1,
        q_len=0,
        kv_len=paged_cache.max_sequence_len(record),
        num_heads=record.query.shape[1],
        num_kv_heads=spec.tiles_per_item,
        head_dim=spec.key_dim,
        value_dim=spec.value_dim,
        dtype=spec.dtype,
        scale=record.softmax_scale,
        soft_cap=None,
        left_window=left,
        right_window=right,
        has_segments=False,
        has_pattern=False,
        has_sinks=False,
        dropout_threshold=0,
        dropout_scale=record.value_scale,
        keys_in_pages=True,
        has_key_starts=record.kv_starts is not None,
        blocks_per_split=spec.steps_per_unit,
        split_doublings=tuple(keys // KEYS_PER_STEP for keys in spec.split_doublings),
    )


def _launch(spec: HopperSpec, paged_spec: PagedSpec, *arrays: jax.Array) -> tuple[jax.Array, ...]:
    """Returns outputs [1, T, H, Dv] and lse [1, H, T], padded to groups of eight rows."""
    operands: dict[str, jax.Array] = dict(zip(OPERAND_NAMES, arrays, strict=True))
    tile = forward_tile(
        HopperForward(block_q=QUERY_ROWS_PER_TILE, block_kv=KEYS_PER_STEP, stages=KEY_BLOCK_STAGES), spec
    )
    # All heads are one bundle, so that tiles are in order over all of them and the live ones come first.
    plan = tile_scheduler.make_tile_schedule(
        operands["table"].shape[1],
        batch_size=1,
        heads_per_batch_row=spec.num_heads,
        reverses_tiles=False,
        head_bytes=1,
        heads_per_group=spec.group_size,
        is_persistent=True,
    )
    return launch_forward_kernel(spec, tile, plan, operands, 1, PagedKeys(paged_spec))
