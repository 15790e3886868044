"""The arguments of the forward kernel, which producer and consumers share."""

import dataclasses
from typing import Any, NamedTuple, Protocol

import jax.experimental.pallas.mosaic_gpu as plgpu
from jax import lax

from ejkernel_pallas.gpu.hopper import tile_scheduler
from ejkernel_pallas.gpu.hopper.sizes import I32, WGMMA_M
from ejkernel_pallas.gpu.tiled_attention.config import ForwardTile
from ejkernel_pallas.gpu.tiled_attention.spec import HopperSpec


@dataclasses.dataclass(frozen=True)
class SharedMemory:
    """Buffers in shared memory and their mbarriers.

    Attributes:
        q: Queries, [buffers * warpgroups, 64, D]; outputs are written through the buffer of their queries. If blocks
            begin with documents, in chunks of 64 columns: [buffers * warpgroups, chunks, 64, 64].
        k: Keys, [stages, block, D], or [stages, chunks, block, 64].
        v: Values, [stages, block, Dv], or [stages, chunks, block, 64].
        lse: [buffers * warpgroups, 64].
        q_full: Mbarriers of the producer: queries have arrived; `k_full` and `v_full` for keys and values.
        q_free: Mbarriers of the consumers: queries have been read; `k_free` and `v_free` for keys and values.
        k_full: As `q_full`, one per stage.
        k_free: As `q_free`, one per stage.
        v_full: As `q_full`, one per stage.
        v_free: As `q_free`, one per stage.
        tile_indices: Indices of the block's tiles, for even and for odd tile counts, [2].
        tile_index_full: Mbarriers: an index has been written.
        tile_index_free: Mbarriers: an index has been read.
        q_dropout_keys: Dropout's keys of queries, [buffers * warpgroups, 64], or None.
        k_dropout_keys: Dropout's keys of keys, [stages + 1, block], or None. They arrive with the keys, and are read
            when those may already be overwritten: one slot more than stages.
        key_ranges: First and last key of every query with segment ids or positions, [buffers * warpgroups, 2, 64], or
            None. If blocks begin with documents, also the first key of its first block: [buffers * warpgroups, 3, 64].
        v_copied: Mbarrier: values that include padding have arrived, or None.
        output: Outputs in the memory of the queries if head dimensions differ, [64-column tiles, 64, 64], or None.
        valid_key_words: [stages] int32, the existing keys of a block, from `PagedKeyAccess.valid_key_word`; None
            without pages.
        q_rows: The chunks of `q` without tiles of eight rows, so that copies may begin with any row; None without
            chunks.
        k_rows: The same for `k`.
        v_rows: The same for `v`.
        split_totals: Accumulators of the splits that have been folded, [warpgroups, ...] in memory of their threads;
            None without splits.
    """

    q: Any
    k: Any
    v: Any
    lse: Any
    q_full: Any
    q_free: Any
    k_full: Any
    k_free: Any
    v_full: Any
    v_free: Any
    tile_indices: Any
    tile_index_full: Any
    tile_index_free: Any
    q_dropout_keys: Any = None
    k_dropout_keys: Any = None
    key_ranges: Any = None
    v_copied: Any = None
    output: Any = None
    valid_key_words: Any = None
    q_rows: Any = None
    k_rows: Any = None
    v_rows: Any = None
    split_totals: Any = None


class PagedTile(NamedTuple):
    """A tile of query rows of one sequence, which may include rows of its neighbours at either end, int32.

    Attributes:
        sequence: Index of the sequence.
        first_position: Position of the tile's first row; rows of other sequences continue the count.
        first_key: The first key that any of its rows attends to.
        key_end: The key after the last one.
        first_row: The tile's first row in the arrays of all sequences.
        sequence_row_start: The first of the tile's rows that belongs to the sequence.
        sequence_row_end: The row after the last of them.
    """

    sequence: Any
    first_position: Any
    first_key: Any
    key_end: Any
    first_row: Any
    sequence_row_start: Any
    sequence_row_end: Any

    def tile_from_row(self, first_row: Any) -> "PagedTile":
        """Returns the tile without its rows before `first_row`."""
        return self._replace(
            first_position=self.first_position + first_row,
            first_row=self.first_row + first_row,
            sequence_row_start=self.sequence_row_start - first_row,
            sequence_row_end=self.sequence_row_end - first_row,
        )


class PagedKeyAccess(Protocol):
    """Access to keys and values in pages, as the producer and the masks need it."""

    @property
    def copies_per_block(self) -> int:
        """Copies per block of keys or of values: arrivals at their mbarrier."""
        ...

    def load_num_live_tiles(self, operands: dict[str, Any]) -> Any:
        """Returns the number of work tiles with queries, the first ones of the list."""
        ...

    def load_tile(self, operands: dict[str, Any], number: Any) -> PagedTile:
        """Returns a tile of queries."""
        ...

    def find_pages(self, operands: dict[str, Any], tile: PagedTile, block: Any) -> tuple[Any, ...]:
        """Returns the page of every copy of a block of keys."""
        ...

    def valid_key_word(self, pages: tuple[Any, ...]) -> Any:
        """Returns a word with the existing keys of a block.

        A thread has two of every eight columns of a tile of scores: so two bits of the word stand for eight keys.
        """
        ...

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
        """Copies a block's keys ("k") or values ("v") of a KV head from its pages; zeros for missing ones."""
        ...


@dataclasses.dataclass(frozen=True)
class Call:
    """The arguments of the kernel.

    Attributes:
        spec: Constants.
        tile: Tile sizes.
        schedule: The order of work tiles.
        operands: Arrays in HBM.
        outputs: Results in HBM: outputs and lse, and those of parts of tiles if some are split.
        shared: Shared memory and barriers.
        tile_counter: Counter of the tiles that blocks took.
        paged_key_access: Access to the keys' pages, if they are in pages.
    """

    spec: HopperSpec
    tile: ForwardTile
    schedule: tile_scheduler.TileSchedule
    operands: dict[str, Any]
    outputs: Any
    shared: SharedMemory
    tile_counter: Any
    paged_key_access: PagedKeyAccess | None = None

    def stage_of_key_block(self, key_blocks_done: Any) -> Any:
        """Returns the pipeline stage of a key block."""
        return lax.rem(key_blocks_done, I32(self.tile.kv_stages))

    def key_block_index(self, item: tile_scheduler.WorkTile, list_index: Any) -> Any:
        """Returns the key block of a step: the step itself, or the entry of the item's list if there are lists."""
        return self.list_entry("blocks", item, list_index) if self.spec.has_block_lists else list_index

    def first_key(self, key_block: Any) -> Any:
        """Returns the first key of what `key_block_index` returns."""
        return key_block if self.spec.lists_first_keys else key_block * self.tile.block_kv

    def list_entry(self, name: str, item: tile_scheduler.WorkTile, list_index: Any) -> Any:
        """Returns an entry of an operand with lists at an index of the item's list."""
        operand = self.operands[name]
        return operand[item.batch_row_of(operand), *item.head_index_of(operand, 4), item.tile_in_head, list_index]

    def key_block_dropout_keys(self, key_blocks_done: Any) -> Any:
        """Returns dropout's keys of a key block."""
        return self.shared.k_dropout_keys.at[lax.rem(key_blocks_done, I32(self.tile.kv_stages + 1))]

    def query_buffer_index(self, nth_tile: Any, warpgroup: Any) -> Any:
        """Returns the index of the buffer with a warpgroup's queries of the nth tile."""
        return lax.rem(nth_tile, I32(self.tile.query_buffers)) * self.tile.consumer_warpgroups + warpgroup


@dataclasses.dataclass(frozen=True)
class QueryTile:
    """The 64 queries of a warpgroup in one work tile.

    Attributes:
        item: The work tile.
        first_query: Index of the warpgroup's first query.
        query_buffer_index: Index of its queries in shared memory.
        paged_tile: The same queries if keys are in pages.
    """

    item: tile_scheduler.WorkTile
    first_query: Any
    query_buffer_index: Any
    paged_tile: PagedTile | None = None


def query_tile_of_warpgroup(
    call: Call, item: tile_scheduler.WorkTile, query_buffer_index: Any, warpgroup: Any
) -> QueryTile:
    """Returns the warpgroup's queries of a work tile."""
    if call.paged_key_access is None:
        return QueryTile(item, item.tile_in_head * call.tile.block_q + warpgroup * WGMMA_M, query_buffer_index)
    paged = call.paged_key_access.load_tile(call.operands, item.tile_in_head).tile_from_row(warpgroup * WGMMA_M)
    return QueryTile(item, paged.first_row, query_buffer_index, paged)


def wait_for_next_tile(call: Call, nth_tile: Any) -> tuple[Any, Any]:
    """Returns the index and the key blocks of the work tile after this one."""
    list_index = lax.rem(nth_tile, I32(2))
    plgpu.barrier_wait(call.shared.tile_index_full.at[list_index])
    # Read before the arrival, after which the producer may overwrite it.
    number = call.shared.tile_indices[list_index]
    plgpu.barrier_arrive(call.shared.tile_index_free.at[list_index])
    return number, tile_scheduler.block_bounds(call.schedule, call.operands["table"], number)
