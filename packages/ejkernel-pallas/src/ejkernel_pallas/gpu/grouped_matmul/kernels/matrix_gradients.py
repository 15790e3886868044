"""Computes sums over the rows of each group on Hopper: the gradient of the matrices.

    warpgroup 2, producer     [64 rows, 128] [64 rows, BN] | ...        TMA, up to `stages` steps ahead, across tiles
    warpgroup 0, consumer     columns 0..63 of the first, transposed, times the second: acc [64, BN]
    warpgroup 1, consumer     columns 64..127

A tile belongs to one matrix; its steps are 64 rows of the matrix's group each, starting at the last multiple of 8 that
is not after the group's first row, where copies can start. The first and the last step may include rows of other
groups: the producer waits for those copies and overwrites them with zeros, in both operands, as zero times NaN is NaN.
Sums are in the order of rows, so that results are reproducible bit for bit.
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
"""Copies in the layout of products start at rows that are multiples of this."""


@dataclasses.dataclass(frozen=True)
class Shared:
    """Buffers in shared memory and their barriers.

    Attributes:
        left: [stages, 64, 128].
        right: [stages, 64, BN].
        out: Output buffers, [warpgroups * slots, 64, part].
        full: Mbarriers: the operands of a stage have arrived.
        free: Mbarriers: the operands of a stage have been read.
        raw: Mbarriers: operands with rows of other groups have arrived, before these are zeroed. One per stage, as the
            other member of a cluster, which may be a step ahead, copies half of them.
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
        matrix: Index of the matrix.
        row: First row of the tile.
        column: First column.
        first: First row of the group.
        end: The row after the group's last.
        start: First row of the first step.
        steps: Number of steps.
    """

    matrix: Any
    row: Any
    column: Any
    first: Any
    end: Any
    start: Any
    steps: Any


def matrices_kernel(call: Call) -> None:
    """Runs one thread block of the kernel: each warpgroup's loop over the block's tiles."""
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
        clusters.end()  # copies and arrivals of the other member access this block's shared memory


def _tile(call: Call, number: Any) -> Tile:
    """Returns the tile with an index: matrix by matrix, each in bands of tile rows, in a band column by column.

    Matrices are ordered by their groups' rows, the largest first. Each block has one tile per `blocks` tiles,
    alternately from either end, so that two consecutive tiles take about as long for all blocks, for any group sizes.
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
    # Copies use a view of the array in tiles of eight rows, and start at one of them.
    start = lax.div(first, I32(ALIGNED)) * ALIGNED
    steps = jnp.where(end > first, lax.div(end - start + (STEP - 1), I32(STEP)), 0)
    return Tile(matrix, row, column, first, end, start, steps)


def _folded(call: Call, number: Any) -> Any:
    """Returns the index of a block's tile in a round: every second round is in reverse order."""
    round_, block = lax.div(number, I32(call.blocks)), lax.rem(number, I32(call.blocks))
    # A last round with fewer tiles than blocks is not reversed.
    whole = (round_ + 1) * call.blocks <= call.spec.matrices * call.spec.down * call.spec.across
    return jnp.where(whole & (lax.rem(round_, I32(2)) == 1), number - block + (call.blocks - 1 - block), number)


def _fetch_tile(call: Call, carry: Any) -> Any:
    """Copies all steps of a tile."""
    number, done = carry
    tile, spec, shared = _tile(call, number), call.spec, call.shared
    left, right = call.operands["left"], call.operands["right"]

    def step(index: Any, done: Any) -> Any:
        slot = lax.rem(done, I32(spec.tile.stages))
        # Steps are counted over all tiles: the ring of stages continues from tile to tile, and its first round finds
        # all stages free.
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

        # This is the same in both members of a cluster, which have tiles of one matrix: multicast copies arrive at the
        # same mbarrier in both.
        aligned = (start >= tile.first) & (start + STEP <= tile.end)
        # All rows belong to the group.
        pl.when(aligned)(lambda: fetch(full))

        @pl.when(~aligned)
        def _clean() -> None:
            # Uses another mbarrier, so that consumers do not see the rows of other groups.
            raw = shared.raw.at[slot]
            fetch(raw)
            # The next copies wait, too. Issuing them first was not faster: 0.91 instead of 0.93 of PyTorch's rate
            # (docs/lab/grouped_matmul_gpu.md).
            plgpu.barrier_wait(raw)
            for buffer in (shared.left, shared.right):
                zero_rows(buffer.at[slot], tile.first - start, tile.end - start)
            # Fence: makes the stores of zeros (generic proxy) visible to the products (async proxy).
            plgpu.commit_smem()
            # Arrives twice, since `full` counts the copies of two operands.
            plgpu.barrier_arrive(full)
            plgpu.barrier_arrive(full)

        return done + 1

    return number + call.blocks, lax.fori_loop(0, tile.steps, step, done)


def _multiply_tile(call: Call, carry: Any) -> Any:
    """Computes a warpgroup's part of a tile, from its products to memory."""
    number, done = carry
    tile, spec, shared = _tile(call, number), call.spec, call.shared
    warpgroup, stages = lax.axis_index("warpgroup"), spec.tile.stages

    def multiply(acc: Any) -> Any:
        def step(index: Any, done: Any) -> Any:
            slot = lax.rem(done, I32(stages))
            plgpu.barrier_wait(shared.full.at[slot])
            aligned = shared.left.at[slot, :, pl.ds(warpgroup * WGMMA_M, WGMMA_M)]
            # The descriptor transposes: WGMMA reads 16-bit operands in either order from shared memory.
            plgpu.wgmma(acc, aligned.transpose((1, 0)), shared.right.at[slot])
            plgpu.wgmma_wait(1)  # the previous product has read its operands
            last = lax.rem(done + (stages - 1), I32(stages))
            # At index 0 the previous product was another tile's, which has freed its stage.
            pl.when(index > 0)(lambda: plgpu.barrier_arrive(shared.free.at[last]))
            return done + 1

        # An empty group has no steps: its gradient is the accumulator's zeros.
        lax.fori_loop(0, tile.steps, step, done)
        return acc[...]

    made = pl.run_scoped(multiply, plgpu.WGMMAAccumulatorRef((WGMMA_M, spec.tile.block_n), jnp.float32))
    done = done + tile.steps
    # `acc[...]` has waited for all products. A tile without steps has used no stage.
    last = lax.rem(done + (stages - 1), I32(stages))
    pl.when(tile.steps > 0)(lambda: plgpu.barrier_arrive(shared.free.at[last]))
    _write(call, tile, made.astype(spec.out))
    return number + call.blocks, done


def _write(call: Call, tile: Tile, made: Any) -> None:
    """Writes a warpgroup's rows through shared memory, some columns at a time."""
    spec, shared, warpgroup = call.spec, call.shared, lax.axis_index("warpgroup")
    row = tile.row + warpgroup * WGMMA_M
    for number in range(spec.tile.block_n // spec.part):
        start = number * spec.part

        def part(number: int = number, start: int = start) -> None:
            slot = warpgroup * spec.tile.slots + number % spec.tile.slots
            # the previous copy out of this buffer has read it
            plgpu.wait_smem_to_gmem(spec.tile.slots - 1, wait_read_only=True)
            shared.out[slot] = made[:, start : start + spec.part]
            plgpu.commit_smem()
            target = call.output.at[tile.matrix, pl.ds(row, WGMMA_M), pl.ds(tile.column + start, spec.part)]
            plgpu.copy_smem_to_gmem(shared.out.at[slot], target)

        # Rows and columns of the last tiles that are past the matrix's ends are not copied.
        pl.when((row < spec.contracted) & (tile.column + start < spec.columns))(part)
