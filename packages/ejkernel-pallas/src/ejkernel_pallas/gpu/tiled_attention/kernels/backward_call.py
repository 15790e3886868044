"""The shared memory and the constants of the backward kernel's warpgroups."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, Literal

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from ejkernel_pallas.gpu.hopper import arrays, tile_scheduler
from ejkernel_pallas.gpu.hopper.sizes import I32, WGMMA_M
from ejkernel_pallas.gpu.tiled_attention.config import BackwardTile
from ejkernel_pallas.gpu.tiled_attention.kernels import pair_functions, tile_masks
from ejkernel_pallas.gpu.tiled_attention.kernels.padding import zero_padding_rows
from ejkernel_pallas.gpu.tiled_attention.spec import HopperSpec

ArraysByName = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Call:
    """The arguments of the kernel.

    Attributes:
        spec: Constants.
        tile: Tile sizes.
        schedule: The assignment of key tiles to blocks.
        loops_by_head: Whether a block loops over all query blocks of a head before those of the group's next head.
        operands: Arrays in device memory.
        outputs: Arrays in device memory: gradients of keys, of values and, in float32 and unscaled, of queries; if
            tiles are split, also the first two for their parts, in float32.
        tile_counter: Counter of the key tiles that blocks, or clusters, have taken.
        dq_add_counts: Semaphores: how many key tiles have added their part of dq, for every query block.
        buffers: Shared memory and barriers.
        cluster_member: Rank of the block in its cluster, whose members share a key tile.
    """

    spec: HopperSpec
    tile: BackwardTile
    schedule: tile_scheduler.TileSchedule
    loops_by_head: bool
    operands: ArraysByName
    outputs: Any
    tile_counter: Any
    dq_add_counts: Any
    buffers: ArraysByName
    cluster_member: Any = 0

    def query_block_index(self, item: tile_scheduler.WorkTile, head: Any, list_index: Any) -> Any:
        """Returns the query block of a step: `list_index` itself, or the entry of the keys' list if there are lists."""
        return self.list_entry("blocks", item, head, list_index) if self.spec.has_block_lists else list_index

    def list_entry(self, name: str, item: tile_scheduler.WorkTile, head: Any, list_index: Any) -> Any:
        """Returns an entry of an operand with lists for the item's keys and a head."""
        operand = self.operands[name]
        return operand[item.batch_row_of(operand), *item.head_index_of(operand, 4, head), item.tile_in_head, list_index]

    def list_bounds(self, item: tile_scheduler.WorkTile, head: Any) -> tuple[Any, ...]:
        """Returns positions in the list of a head: its start, the start and end of its full blocks, and its end."""
        return tuple(self.list_entry("table", item, head, n) for n in range(4))


@dataclasses.dataclass(frozen=True)
class QueryBlockRuns:
    """The query blocks that a block loops over.

    Attributes:
        item: The key tile whose dk and dv it accumulates.
        first_query_head: The first of the query heads that share the keys.
        block_bounds: Start of the query tiles, start and end of full ones, and end; without a pattern.
    """

    item: tile_scheduler.WorkTile
    first_query_head: Any
    block_bounds: tuple[Any, ...]


@dataclasses.dataclass(frozen=True)
class MaskInputs:
    """What masks a tile of scores of 64 keys with a query block.

    Attributes:
        first_key: Index of the first key.
        row_ids: Segment ids of the keys, or None.
        slot: The stage of the queries.
        query_block_index: The tile of queries.
        words: Bits of the pattern, from `load_pattern_words`.
    """

    first_key: Any
    row_ids: Any
    slot: Any
    query_block_index: Any
    words: tuple[Any, ...]


@dataclasses.dataclass(frozen=True)
class ScoreFunctions:
    """What turns a step's products of queries and keys into scores.

    Attributes:
        call: The kernel's arguments.
        pairs: The pairs of the tile for the caller's functions, from `make_pair_tile`; None without functions.
        mask: What masks the tile; None for a full block.
    """

    call: Call
    pairs: pair_functions.PairTile | None
    mask: MaskInputs | None

    def modify_and_mask(self, products: Any) -> tuple[Any, Any]:
        """Returns scores, and what `weights_and_slopes` needs: products, or their tanh under a soft cap, if their
        gradients differ from those of the scores; otherwise None.
        """
        spec = self.call.spec
        unmodified = jnp.tanh(products * spec.product_scale) if spec.soft_cap is not None else products
        scores = unmodified if self.pairs is None else pair_functions.modify_scores(spec, unmodified, self.pairs)
        return self.mask_scores(scores), unmodified if spec.has_slope else None

    def mask_scores(self, scores: Any) -> Any:
        """Returns scores, float32 [64, queries], minus infinity for masked pairs."""
        call, mask = self.call, self.mask
        if mask is None:
            return scores
        if not call.spec.masks_by_function_alone(call.tile.block_kv):
            first_query = mask.query_block_index * call.tile.block_q
            query_limits = tile_masks.query_column_range(call.spec, WGMMA_M, first_query, mask.first_key)
            ids = None if mask.row_ids is None else (mask.row_ids, call.buffers["q_ids"].at[mask.slot])
            scores = tile_masks.mask_outside_query_range(scores, *query_limits, ids, mask.words)
        return scores if self.pairs is None else pair_functions.mask_pairs(call.spec, scores, self.pairs)

    def weights_and_slopes(self, weights: Any, unmodified_scores: Any) -> Iterator[Any]:
        """Yields the weights and, if products have other gradients than scores, the weights times the derivative,
        computed when the weights are 16-bit to save registers.
        """
        yield weights
        spec = self.call.spec
        if spec.soft_cap is not None:
            weights = weights * (1 - unmodified_scores * unmodified_scores)
        if self.pairs is not None and spec.has_score_slope:
            weights = pair_functions.multiply_by_slope(spec, weights, unmodified_scores, self.pairs)
        if spec.has_slope:
            yield weights


def for_each_query_block(
    call: Call, query_runs: QueryBlockRuns, body: Callable[..., Any], state: Any, has_masked_loops: bool
) -> Any:
    """Loops over query blocks in reverse, in runs: partial, full, partial; each over all heads, or head by head.

    With a pattern, `body` gets indices in the list of the item's keys and a head.
    """
    item, heads = query_runs.item, 1 if call.loops_by_head else call.spec.group_size

    def loop_over_run(head: Any, run_start: Any, run_end: Any, has_masked_pairs: bool, state: Any) -> Any:
        def step(n: Any, state: Any) -> Any:
            return body(has_masked_pairs, head + lax.rem(n, I32(heads)), run_end - 1 - lax.div(n, I32(heads)), state)

        # From the last block to the first, in all thread blocks: one that starts a step after its predecessor never
        # waits to add to dq.
        return lax.fori_loop(0, (run_end - run_start) * heads, step, state)

    def loop_over_runs(n: Any, state: Any) -> Any:
        head = query_runs.first_query_head + n
        start, full_start, full_end, stop = (
            call.list_bounds(item, head) if call.spec.has_block_lists else query_runs.block_bounds
        )
        if not has_masked_loops:
            return loop_over_run(head, start, stop, False, state)
        # Separate loops for full and partial blocks, since masks take registers and instructions in every step.
        state = loop_over_run(head, full_start, full_end, False, loop_over_run(head, full_end, stop, True, state))
        return loop_over_run(head, start, full_start, True, state)

    return (
        lax.fori_loop(0, call.spec.group_size, loop_over_runs, state)
        if call.loops_by_head
        else loop_over_runs(I32(0), state)
    )


def wait_for_tiles_and_zero_padding(call: Call, steps_done: Any, may_have_padding: bool) -> None:
    """With segments, waits for a step's tiles, and zeroes rows that may be padding.

    Without segments, products wait for them.
    """
    # Only segments have padding inside a tile, which must be overwritten before a product reads it.
    if not call.spec.has_segments:
        return
    buffers = call.buffers
    slots = {name: lax.rem(steps_done, I32(stages)) for name, stages in call.tile.stages_by_operand.items()}
    for name, slot in slots.items():
        plgpu.barrier_wait(buffers[f"{name}_full"].at[slot])
    if may_have_padding:
        ids = buffers["q_ids"].at[slots["q"]]
        zero_padding(
            ids, *((buffers[name].at[slot], call.tile.array_swizzle_bytes(name)) for name, slot in slots.items())
        )


def adder_warp_of_piece(call: Call, steps_done: Any, piece: int) -> Any:
    """Returns which warp adds a piece of a step's part of dq."""
    # Round-robin: a warp that waits for earlier key tiles does not delay the other pieces.
    return lax.rem(steps_done * call.tile.num_dq_pieces + piece, I32(call.tile.num_dq_adder_warps))


def dq_full_barrier(call: Call, steps_done: Any, piece: int) -> Any:
    """Returns the mbarrier at which the adder warp of a piece of a step's part of dq waits for it.

    Each warp has one per piece, since the warpgroups finish in any order.
    """
    return call.buffers["dq_full"].at[
        piece * call.tile.num_dq_adder_warps + adder_warp_of_piece(call, steps_done, piece)
    ]


def store_split_gradient(
    call: Call, item: tile_scheduler.WorkTile, operand_name: Literal["k", "v"], first_row: Any, gradient: Any
) -> None:
    """Stores the gradient of 64 keys or values from `first_row` on, for one part of a split tile."""
    _, _, _, keys, values = call.outputs
    parts = keys if operand_name == "k" else values
    # In float32: XLA adds up the parts, in a fixed order.
    parts[item.split_index, pl.ds(first_row, WGMMA_M)] = gradient


def key_slice(call: Call, operand_name: str, item: tile_scheduler.WorkTile, key_block_in_tile: Any) -> Any:
    """Returns 64 of a tile's keys in an operand in device memory."""
    operand = call.operands[operand_name]
    return operand.at[
        item.batch_row_of(operand), pl.ds(item.tile_in_head * call.tile.block_kv + key_block_in_tile * WGMMA_M, WGMMA_M)
    ]


def query_dropout_keys(call: Call, item: tile_scheduler.WorkTile, head: Any, query_block_index: Any) -> Any:
    """Returns dropout's keys of a step's queries in device memory, if they do not fit shared memory."""
    dropout_keys, queries = call.operands["q_dropout_keys"], call.tile.block_q
    return arrays.load_column_vector(
        dropout_keys.at[item.batch_row_of(dropout_keys), head, pl.ds(query_block_index * queries, queries)]
    )


def zero_padding(ids: Any, *tiles_and_swizzle_bytes: tuple[Any, int]) -> None:
    """Zeroes padding rows, which may hold anything: a weight of zero times NaN is NaN.

    A warpgroup zeroes all that its products read; the other one may write the same zeros.
    """
    for part, line in tiles_and_swizzle_bytes:
        zero_padding_rows(part, ids, line)
    plgpu.commit_smem()


def make_pair_tile(
    call: Call, item: tile_scheduler.WorkTile, head: Any, first_key: Any, query_block_index: Any
) -> pair_functions.PairTile | None:
    """Returns the pairs of 64 keys and a query block for the caller's functions; None without functions."""
    if not call.spec.has_pair_functions:
        return None
    batch, head, first_query, first_key = lax.optimization_barrier(
        (item.batch_row, head, query_block_index * call.tile.block_q, first_key)
    )
    return pair_functions.PairTile(call.operands, batch, head, first_query, first_key, rows_are_queries=False)


def load_pattern_words(
    call: Call, item: tile_scheduler.WorkTile, head: Any, list_index: Any, key_block_in_tile: Any
) -> tuple[Any, ...]:
    """Returns bits of the pattern for 64 of the item's keys, from `key_block_in_tile` times 64 on, and a query
    block.
    """
    if not call.spec.has_pattern:
        return ()
    words = call.operands["mask_words"].at[I32(0), call.list_entry("mask_ids", item, head, list_index)]
    return tile_masks.load_mask_words(words, key_block_in_tile * WGMMA_M, call.tile.block_q)
