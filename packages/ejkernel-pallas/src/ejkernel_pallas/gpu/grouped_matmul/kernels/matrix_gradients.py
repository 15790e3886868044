"""Sums over the rows of each group on Hopper: the gradient of the matrices.

    warpgroup 2, producer     [64 rows, 128] [64 rows, BN] | ...        TMA, up to `stages` steps ahead, across tiles
    warpgroup 0, consumer     columns 0..63 of the first, transposed, times the second: acc [64, BN]
    warpgroup 1, consumer     columns 64..127

A tile is part of one matrix; its steps are 64 rows of the matrix's group each, from the multiple of 8 at or before its
first row on, which is where copies can begin. The first and the last step may have rows of other groups: the producer
waits for those copies and writes zeros over them, in both operands, as zero times NaN is NaN. Sums are taken in the
order of rows, so that results are reproducible bit for bit.
"""

import dataclasses
import functools
from typing import Any

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from ejkernel_pallas.gpu.grouped_matmul.kernels.call import Call
from ejkernel_pallas.gpu.grouped_matmul.spec import (
    BLOCK_M,
    FETCHING_REGISTERS,
    REGISTERS,
    STEP,
    WARPGROUPS,
)
from ejkernel_pallas.gpu.hopper import clusters
from ejkernel_pallas.gpu.hopper.row_ranges import zero_rows
from ejkernel_pallas.gpu.hopper.sizes import I32, WGMMA_M

ALIGNED = 8
"""Rows of an array that copies in the order of products take together."""


@dataclasses.dataclass(frozen=True)
class Shared:
    """Buffers in shared memory and their barriers.

    Attributes:
        left: [stages, 64, 128].
        right: [stages, 64, BN].
        out: Slots of the output, [warpgroups * slots, 64, part].
        full: The operands of a stage are there.
        free: They have been read.
        raw: The operands of a stage that have rows of other groups are there. One a stage, as the other member of a
            cluster, which may be a step ahead, copies half of them.
    """

    left: Any
    right: Any
    out: Any
    full: Any
    free: Any
    raw: Any


@dataclasses.dataclass(frozen=True)
class Tile:
    """One tile of one matrix.

    Attributes:
        matrix: Its number.
        row: First row of the tile.
        column: First column.
        first: First row of the group.
        end: The row after its last.
        start: Where the first step begins.
        steps: How many there are.
    """

    matrix: Any
    row: Any
    column: Any
    first: Any
    end: Any
    start: Any
    steps: Any


def matrices_kernel(call: Call) -> None:
    """Body of the kernel: what each warpgroup does for all tiles of its block."""
    warpgroup, spec = lax.axis_index("warpgroup"), call.spec
    count = spec.matrices * spec.down * spec.across

    def every(work: Any) -> None:
        lax.while_loop(lambda carry: carry[0] < count, functools.partial(work, call), (lax.axis_index("block"), I32(0)))

    @pl.when(warpgroup < WARPGROUPS)
    def _multiply() -> None:
        plgpu.set_max_registers(REGISTERS, action="increase")
        every(_multiply_tile)
        plgpu.wait_smem_to_gmem(0)

    @pl.when(warpgroup == WARPGROUPS)
    def _fetch() -> None:
        plgpu.set_max_registers(FETCHING_REGISTERS, action="decrease")
        every(_fetch_tile)

    if spec.members > 1:
        clusters.end()  # copies and arrivals of the other member reach into this one's shared memory


def _tile(call: Call, number: Any) -> Tile:
    """Returns the tile that has a number: matrix after matrix, in each band after band, in a band column after column.

    Matrices come in the order of their groups' rows, the most first. Each block has one tile of every `blocks`, in turn
    from either end, so that two tiles in a row take as long for all blocks, whatever the sizes of groups are.
    """
    spec = call.spec
    number = _folded(call, number)
    per_matrix, per_band = spec.down * spec.across, spec.tile.band * spec.across
    matrix, place = lax.div(number, I32(per_matrix)), lax.rem(number, I32(per_matrix))
    band, place = lax.div(place, I32(per_band)), lax.rem(place, I32(per_band))
    height = jnp.minimum(spec.down - band * spec.tile.band, spec.tile.band)
    row = ((band * spec.tile.band + lax.rem(place, height)) * spec.tile.cluster_m + call.below) * BLOCK_M
    column = (lax.div(place, height) * spec.tile.cluster_n + call.beside) * spec.tile.block_n
    first, end, matrix = (call.operands["bounds"][matrix, n] for n in range(3))
    # Copies go through a view of the array in tiles of eight rows, and begin at one of them.
    start = lax.div(first, I32(ALIGNED)) * ALIGNED
    steps = jnp.where(end > first, lax.div(end - start + (STEP - 1), I32(STEP)), 0)
    return Tile(matrix, row, column, first, end, start, steps)


def _folded(call: Call, number: Any) -> Any:
    """Returns number of the tile that a block has in a round: blocks take every second round of tiles from its end."""
    round_, block = lax.div(number, I32(call.blocks)), lax.rem(number, I32(call.blocks))
    # A last round that has fewer tiles than there are blocks begins with the first block.
    whole = (round_ + 1) * call.blocks <= call.spec.matrices * call.spec.down * call.spec.across
    return jnp.where(whole & (lax.rem(round_, I32(2)) == 1), number - block + (call.blocks - 1 - block), number)


def _fetch_tile(call: Call, carry: Any) -> Any:
    """Fetches all steps of a tile."""
    number, done = carry
    tile, spec, shared = _tile(call, number), call.spec, call.shared
    left, right = call.operands["left"], call.operands["right"]

    def step(index: Any, done: Any) -> Any:
        slot = lax.rem(done, I32(spec.tile.stages))
        # Steps of all tiles are counted on: the ring of stages runs on from tile to tile, and its first round finds
        # them free.
        pl.when(done >= spec.tile.stages)(lambda: plgpu.barrier_wait(shared.free.at[slot]))
        start = tile.start + index * STEP
        rows, full = pl.ds(start, STEP), shared.full.at[slot]

        def fetch(there: Any) -> None:
            down, across = pl.ds(tile.row, BLOCK_M), pl.ds(tile.column, spec.tile.block_n)
            # Multicast: each member of a cluster copies one half of what both of them read.
            beside = clusters.AXIS if spec.tile.cluster_n > 1 else None
            below = clusters.AXIS if spec.tile.cluster_m > 1 else None
            copy = plgpu.copy_gmem_to_smem
            copy(left.at[rows, down], shared.left.at[slot], there, collective_axes=beside)
            copy(right.at[rows, across], shared.right.at[slot], there, collective_axes=below)

        # The same in both members of a cluster, which have tiles of one matrix: multicast copies arrive at the same
        # barrier in both.
        aligned = (start >= tile.first) & (start + STEP <= tile.end)
        # The rows are all the group's.
        pl.when(aligned)(lambda: fetch(full))

        @pl.when(~aligned)
        def _clean() -> None:
            # Through another barrier: consumers must not see the rows of other groups.
            raw = shared.raw.at[slot]
            fetch(raw)
            # The next copies wait, too. Issuing them first was no faster: 0.91 instead of 0.93 of PyTorch's rate
            # (docs/lab/grouped_matmul_gpu.md).
            plgpu.barrier_wait(raw)
            for buffer in (shared.left, shared.right):
                zero_rows(buffer.at[slot], tile.first - start, tile.end - start)
            # Fence: the products read by the asynchronous proxy what the zeros were written to by the generic one.
            plgpu.commit_smem()
            # Twice: `full` counts the copies of two operands.
            plgpu.barrier_arrive(full)
            plgpu.barrier_arrive(full)

        return done + 1

    return number + call.blocks, lax.fori_loop(0, tile.steps, step, done)


def _multiply_tile(call: Call, carry: Any) -> Any:
    """Returns a warpgroup's part of a tile, from its products to memory."""
    number, done = carry
    tile, spec, shared = _tile(call, number), call.spec, call.shared
    warpgroup, stages = lax.axis_index("warpgroup"), spec.tile.stages

    def multiply(acc: Any) -> Any:
        def step(index: Any, done: Any) -> Any:
            slot = lax.rem(done, I32(stages))
            plgpu.barrier_wait(shared.full.at[slot])
            aligned = shared.left.at[slot, :, pl.ds(warpgroup * WGMMA_M, WGMMA_M)]
            # The transposition is in the descriptor: WGMMA reads 16-bit operands of either order from shared memory.
            plgpu.wgmma(acc, aligned.transpose((1, 0)), shared.right.at[slot])
            plgpu.wgmma_wait(1)  # the product before this one has read its operands
            last = lax.rem(done + (stages - 1), I32(stages))
            # At 0 the product before was another tile's, which has freed its stage itself.
            pl.when(index > 0)(lambda: plgpu.barrier_arrive(shared.free.at[last]))
            return done + 1

        # An empty group has no step: its gradient is the accumulator's zeros.
        lax.fori_loop(0, tile.steps, step, done)
        return acc[...]

    made = pl.run_scoped(multiply, plgpu.WGMMAAccumulatorRef((WGMMA_M, spec.tile.block_n), jnp.float32))
    done = done + tile.steps
    # Behind `acc[...]`, which has waited for all products. A tile without steps has taken no stage.
    last = lax.rem(done + (stages - 1), I32(stages))
    pl.when(tile.steps > 0)(lambda: plgpu.barrier_arrive(shared.free.at[last]))
    _write(call, tile, made.astype(spec.out))
    return number + call.blocks, done


def _write(call: Call, tile: Tile, made: Any) -> None:
    """Writes a warpgroup's rows by way of shared memory, part of the columns after part."""
    spec, shared, warpgroup = call.spec, call.shared, lax.axis_index("warpgroup")
    row = tile.row + warpgroup * WGMMA_M
    for number in range(spec.tile.block_n // spec.part):
        start = number * spec.part

        def part(number: int = number, start: int = start) -> None:
            slot = warpgroup * spec.tile.slots + number % spec.tile.slots
            plgpu.wait_smem_to_gmem(spec.tile.slots - 1, wait_read_only=True)  # the copy that had the slot has read it
            shared.out[slot] = made[:, start : start + spec.part]
            plgpu.commit_smem()
            target = call.output.at[tile.matrix, pl.ds(row, WGMMA_M), pl.ds(tile.column + start, spec.part)]
            plgpu.copy_smem_to_gmem(shared.out.at[slot], target)

        # Rows and columns of the last tiles that the matrix does not have need no copy.
        pl.when((row < spec.contracted) & (tile.column + start < spec.columns))(part)
