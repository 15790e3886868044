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
    """Buffers in shared memory and their barriers.

    Attributes:
        q: Queries, [buffers * warpgroups, 64, D]; outputs leave through the buffer that their queries came in.
        k: Keys, [stages, block, D].
        v: Values, [stages, block, Dv].
        lse: [buffers * warpgroups, 64].
        q_full: mbarriers of the producer: queries have arrived; `k_full` and `v_full` for keys and values.
        q_free: mbarriers of the consumers: queries have been read; `k_free` and `v_free` for keys and values.
        k_full: As `q_full`, one per stage.
        k_free: As `q_free`, one per stage.
        v_full: As `q_full`, one per stage.
        v_free: As `q_free`, one per stage.
        number: Numbers of the tiles that the block owns in even and in odd turns, [2].
        number_full: They are there.
        number_free: They have been read.
        q_numbers: Of queries, for dropout, [buffers * warpgroups, 64], or None.
        k_numbers: Of keys, [stages + 1, block], or None. They are there with the keys, and are read when those need not
            be there any more: while another stage has its keys read.
        ranges: First and last key of every query where there are segment ids, [buffers * warpgroups, 2, 64], or None.
        v_raw: Values that have padding among them are there, or None.
        output: Outputs in the memory of the queries where head dimensions differ, [64-column tiles, 64, 64], or None.
        present: [stages] int32, which keys of a block are there, as `KeyPages.word` says; None without pages.
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
    q_numbers: Any = None
    k_numbers: Any = None
    ranges: Any = None
    v_raw: Any = None
    output: Any = None
    present: Any = None


class PagedTile(NamedTuple):
    """A tile of query rows that all belong to one sequence, or to others before and behind it, int32.

    Attributes:
        sequence: Its number.
        position: Of the tile's first row; rows of other sequences count on.
        low: The first key that any of its rows attends to.
        keys: One more than the last key.
        row: The tile's first row in the arrays of all sequences.
        first: Of the tile's rows, the first that is the sequence's.
        end: Behind the last of them.
    """

    sequence: Any
    position: Any
    low: Any
    keys: Any
    row: Any
    first: Any
    end: Any

    def part(self, first: Any) -> "PagedTile":
        """Returns the rows from one of the tile on."""
        return self._replace(
            position=self.position + first, row=self.row + first, first=self.first - first, end=self.end - first
        )


class KeyPages(Protocol):
    """Keys and values that lie in pages, for the producer and the masks."""

    @property
    def copies(self) -> int:
        """Copies of a block of keys or of values: arrivals at their barrier."""
        ...

    def live(self, operands: dict[str, Any]) -> Any:
        """Work tiles that have queries: the first of the list."""
        ...

    def tile(self, operands: dict[str, Any], number: Any) -> PagedTile:
        """A tile of queries."""
        ...

    def find(self, operands: dict[str, Any], tile: PagedTile, block: Any) -> tuple[Any, ...]:
        """The page of every copy of a block of keys."""
        ...

    def word(self, pages: tuple[Any, ...]) -> Any:
        """Which keys of a block are there.

        A thread has two of every eight columns of a tile of scores: so many bits of the word are for eight keys.
        """
        ...

    def copy(
        self, operands: dict[str, Any], what: str, pages: tuple[Any, ...], block: Any, head: Any, target: Any, full: Any
    ) -> None:
        """Copies a block's keys ("k") or values ("v") of a KV head out of its pages, zeros for what is not there."""
        ...


@dataclasses.dataclass(frozen=True)
class Call:
    """What the kernel is given.

    Attributes:
        spec: Constants.
        tile: Tile sizes.
        plan: The order of work tiles.
        operands: Arrays in HBM.
        outputs: Results in HBM: outputs and lse, and those of parts of tiles where some are split.
        shared: Shared memory and barriers.
        tile_counter: Counter of the tiles that blocks took.
        pages: Where keys lie, if in pages.
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

    def key_block(self, item: tile_scheduler.WorkTile, place: Any) -> Any:
        """Returns the key block of a step: the step itself, or with a pattern what the item's list has there."""
        return self.listed("blocks", item, place) if self.spec.pattern else place

    def listed(self, name: str, item: tile_scheduler.WorkTile, place: Any) -> Any:
        """Returns what an operand of a pattern has at a place of the item's list."""
        operand = self.operands[name]
        return operand[item.row(operand), *item.head_row(operand, 4), item.tile, place]

    def numbers(self, count: Any) -> Any:
        """Returns dropout's hash keys of a key block."""
        return self.shared.k_numbers.at[lax.rem(count, I32(self.tile.stages + 1))]

    def buffer(self, nth_tile: Any, warpgroup: Any) -> Any:
        """Returns the buffer that the queries of a nth_tile are in."""
        return lax.rem(nth_tile, I32(self.tile.buffers)) * self.tile.warpgroups + warpgroup


@dataclasses.dataclass(frozen=True)
class QueryTile:
    """The 64 queries of a warpgroup in one work tile.

    Attributes:
        item: The work tile.
        row: Index of the warpgroup's first query.
        buffer: Index of its queries in shared memory.
        paged: The same queries where keys lie in pages.
    """

    item: tile_scheduler.WorkTile
    row: Any
    buffer: Any
    paged: PagedTile | None = None


def queries_of(call: Call, item: tile_scheduler.WorkTile, buffer: Any, warpgroup: Any) -> QueryTile:
    """Returns the warpgroup's queries of a work tile."""
    if call.pages is None:
        return QueryTile(item, item.tile * call.tile.queries + warpgroup * WGMMA_M, buffer)
    paged = call.pages.tile(call.operands, item.tile).part(warpgroup * WGMMA_M)
    return QueryTile(item, paged.row, buffer, paged)


def next_tile(call: Call, nth_tile: Any) -> tuple[Any, Any]:
    """Returns number and key blocks of the work tile after this one."""
    place = lax.rem(nth_tile, I32(2))
    plgpu.barrier_wait(call.shared.number_full.at[place])
    # Read before the arrival, after which the producer may overwrite it.
    number = call.shared.number[place]
    plgpu.barrier_arrive(call.shared.number_free.at[place])
    return number, tile_scheduler.block_range(call.plan, call.operands["table"], number)
