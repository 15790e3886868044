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
class Shared:
    """Buffers in shared memory and their mbarriers.

    Attributes:
        q: Queries, [buffers * warpgroups, 64, D]; outputs are written through the buffer of their queries.
        k: Keys, [stages, block, D].
        v: Values, [stages, block, Dv].
        lse: [buffers * warpgroups, 64].
        q_full: Mbarriers of the producer: queries have arrived; `k_full` and `v_full` for keys and values.
        q_free: Mbarriers of the consumers: queries have been read; `k_free` and `v_free` for keys and values.
        k_full: As `q_full`, one per stage.
        k_free: As `q_free`, one per stage.
        v_full: As `q_full`, one per stage.
        v_free: As `q_free`, one per stage.
        number: Indices of the block's tiles, for even and for odd tile counts, [2].
        number_full: Mbarriers: an index has been written.
        number_free: Mbarriers: an index has been read.
        q_dropout_keys: Dropout's keys of queries, [buffers * warpgroups, 64], or None.
        k_dropout_keys: Dropout's keys of keys, [stages + 1, block], or None. They arrive with the keys, and are read
            when those may already be overwritten: one slot more than stages.
        ranges: First and last key of every query with segment ids, [buffers * warpgroups, 2, 64], or None.
        v_raw: Mbarrier: values that include padding have arrived, or None.
        output: Outputs in the memory of the queries if head dimensions differ, [64-column tiles, 64, 64], or None.
        present: [stages] int32, the existing keys of a block, from `KeyPages.valid_key_word`; None without pages.
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
    number: Any
    number_full: Any
    number_free: Any
    q_dropout_keys: Any = None
    k_dropout_keys: Any = None
    ranges: Any = None
    v_raw: Any = None
    output: Any = None
    present: Any = None


class PagedTile(NamedTuple):
    """A tile of query rows of one sequence, which may include rows of its neighbours at either end, int32.

    Attributes:
        sequence: Index of the sequence.
        position: Position of the tile's first row; rows of other sequences continue the count.
        low: The first key that any of its rows attends to.
        keys: The key after the last one.
        row: The tile's first row in the arrays of all sequences.
        first: The first of the tile's rows that belongs to the sequence.
        end: The row after the last of them.
    """

    sequence: Any
    position: Any
    low: Any
    keys: Any
    row: Any
    first: Any
    end: Any

    def part(self, first: Any) -> "PagedTile":
        """Returns the rows from `first` on."""
        return self._replace(
            position=self.position + first, row=self.row + first, first=self.first - first, end=self.end - first
        )


class KeyPages(Protocol):
    """Keys and values in pages, as the producer and the masks need them."""

    @property
    def copies(self) -> int:
        """Copies per block of keys or of values: arrivals at their mbarrier."""
        ...

    def count_live_tiles(self, operands: dict[str, Any]) -> Any:
        """Returns the number of work tiles with queries, the first ones of the list."""
        ...

    def tile(self, operands: dict[str, Any], number: Any) -> PagedTile:
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

    def copy(
        self,
        operands: dict[str, Any],
        operand_name: str,
        pages: tuple[Any, ...],
        block: Any,
        head: Any,
        target: Any,
        full: Any,
    ) -> None:
        """Copies a block's keys ("k") or values ("v") of a KV head from its pages; zeros for missing ones."""
        ...


@dataclasses.dataclass(frozen=True)
class Call:
    """The arguments of the kernel.

    Attributes:
        spec: Constants.
        tile: Tile sizes.
        plan: The order of work tiles.
        operands: Arrays in HBM.
        outputs: Results in HBM: outputs and lse, and those of parts of tiles if some are split.
        shared: Shared memory and barriers.
        tile_counter: Counter of the tiles that blocks took.
        pages: Access to the keys' pages, if they are in pages.
    """

    spec: HopperSpec
    tile: ForwardTile
    plan: tile_scheduler.TileSchedule
    operands: dict[str, Any]
    outputs: Any
    shared: Shared
    tile_counter: Any
    pages: KeyPages | None = None

    def slot(self, count: Any) -> Any:
        """Returns the pipeline stage of a key block."""
        return lax.rem(count, I32(self.tile.stages))

    def key_block(self, item: tile_scheduler.WorkTile, list_index: Any) -> Any:
        """Returns the key block of a step: the step itself, or with a pattern the entry of the item's list."""
        return self.list_entry("blocks", item, list_index) if self.spec.pattern else list_index

    def list_entry(self, name: str, item: tile_scheduler.WorkTile, list_index: Any) -> Any:
        """Returns an entry of a pattern's operand at an index of the item's list."""
        operand = self.operands[name]
        return operand[item.row(operand), *item.head_row(operand, 4), item.tile, list_index]

    def key_block_dropout_keys(self, count: Any) -> Any:
        """Returns dropout's keys of a key block."""
        return self.shared.k_dropout_keys.at[lax.rem(count, I32(self.tile.stages + 1))]

    def buffer(self, nth_tile: Any, warpgroup: Any) -> Any:
        """Returns the index of the buffer with a warpgroup's queries of the nth tile."""
        return lax.rem(nth_tile, I32(self.tile.buffers)) * self.tile.warpgroups + warpgroup


@dataclasses.dataclass(frozen=True)
class QueryTile:
    """The 64 queries of a warpgroup in one work tile.

    Attributes:
        item: The work tile.
        row: Index of the warpgroup's first query.
        buffer: Index of its queries in shared memory.
        paged: The same queries if keys are in pages.
    """

    item: tile_scheduler.WorkTile
    row: Any
    buffer: Any
    paged: PagedTile | None = None


def query_tile_of(call: Call, item: tile_scheduler.WorkTile, buffer: Any, warpgroup: Any) -> QueryTile:
    """Returns the warpgroup's queries of a work tile."""
    if call.pages is None:
        return QueryTile(item, item.tile * call.tile.queries + warpgroup * WGMMA_M, buffer)
    paged = call.pages.tile(call.operands, item.tile).part(warpgroup * WGMMA_M)
    return QueryTile(item, paged.row, buffer, paged)


def next_tile(call: Call, nth_tile: Any) -> tuple[Any, Any]:
    """Returns the index and the key blocks of the work tile after this one."""
    list_index = lax.rem(nth_tile, I32(2))
    plgpu.barrier_wait(call.shared.number_full.at[list_index])
    # Read before the arrival, after which the producer may overwrite it.
    number = call.shared.number[list_index]
    plgpu.barrier_arrive(call.shared.number_free.at[list_index])
    return number, tile_scheduler.block_range(call.plan, call.operands["table"], number)
