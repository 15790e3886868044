"""Sends this device's rows to all devices: memory of this device -> shared memory -> memory of all, this one included.

    warpgroup 1, producer     piece | piece | ...     up to `STAGES` ahead
    warpgroup 0               piece -> device i, i + 1, i + 2, ...

A kernel ends when the rows of all others have arrived.
"""

import dataclasses
from typing import Any

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
from jax import lax

from ejkernel_pallas.gpu.collective_matmul.kernels import synchronisation
from ejkernel_pallas.gpu.hopper.sizes import I32, WGMMA_M

STAGES = 6
"""Pieces in shared memory."""
PIECES_IN_FLIGHT = 3
"""Pieces that are being sent, at most, while a further one is."""
MAX_PIECE_COLUMNS = 256
"""Columns of a piece, at most: what one copy takes."""


@dataclasses.dataclass(frozen=True)
class Call:
    """The arguments of the kernel.

    Attributes:
        axis_name: The mesh axis.
        num_devices: Devices along it.
        num_blocks: Number of thread blocks.
        x: This device's rows in device memory, [M, K].
        gathered: The rows of all devices, [P M, K].
        arrivals: Counter of blocks of other devices that have sent all their pieces.
        pieces: Pieces in shared memory, [STAGES, 64, columns].
        full: Mbarriers: a piece has arrived.
        free: Mbarriers: a piece has been read.
    """

    axis_name: str
    num_devices: int
    num_blocks: int
    x: Any
    gathered: Any
    arrivals: Any
    pieces: Any
    full: Any
    free: Any


def gather_rows_kernel(call: Call) -> None:
    """Runs one thread block of the kernel."""
    pl.when(lax.axis_index("warpgroup") == 0)(lambda: _send_pieces(call))
    pl.when(lax.axis_index("warpgroup") == 1)(lambda: _load_pieces(call))


def piece_columns(width: int) -> int:
    """Returns the columns of a piece of rows that have a multiple of 64 elements."""
    return next(columns for columns in (MAX_PIECE_COLUMNS, 128, 64) if width % columns == 0)


def _for_each_piece(call: Call, process: Any) -> Any:
    """Calls a function for each of the block's pieces: (pieces done, rows, columns, stage) -> None; returns the
    number of pieces.
    """
    rows, width = call.x.shape
    columns = piece_columns(width)
    pieces_per_row = width // columns

    def process_and_advance(carry: Any) -> Any:
        number, done = carry
        row, column = lax.div(number, I32(pieces_per_row)), lax.rem(number, I32(pieces_per_row))
        process(done, row * WGMMA_M, pl.ds(column * columns, columns), lax.rem(done, I32(STAGES)))
        return number + call.num_blocks, done + 1

    total = rows // WGMMA_M * pieces_per_row
    first = lax.axis_index("block"), I32(0)
    return lax.while_loop(lambda carry: carry[0] < total, process_and_advance, first)[1]


def _load_pieces(call: Call) -> None:
    """Copies pieces to shared memory, each once its stage is free."""

    def load(done: Any, row: Any, columns: Any, slot: Any) -> None:
        pl.when(done >= STAGES)(lambda: plgpu.barrier_wait(call.free.at[slot]))
        plgpu.copy_gmem_to_smem(call.x.at[pl.ds(row, WGMMA_M), columns], call.pieces.at[slot], call.full.at[slot])

    _for_each_piece(call, load)


def _send_pieces(call: Call) -> None:
    """Copies pieces to the memory of all devices, and waits for those of others."""
    me, others = lax.axis_index(call.axis_name), call.num_devices - 1
    devices = [
        synchronisation.remote_device(call.axis_name, lax.rem(me + offset, I32(call.num_devices)))
        for offset in range(1, call.num_devices)
    ]

    def send(done: Any, row: Any, columns: Any, slot: Any) -> None:
        plgpu.barrier_wait(call.full.at[slot])
        rows = pl.ds(me * call.x.shape[0] + row, WGMMA_M)
        for target in (call.gathered, *(plgpu.remote_ref(call.gathered, device) for device in devices)):
            plgpu.copy_smem_to_gmem(call.pieces.at[slot], target.at[rows, columns])
        plgpu.wait_smem_to_gmem(PIECES_IN_FLIGHT * call.num_devices, wait_read_only=True)
        read = lax.rem(done + (STAGES - PIECES_IN_FLIGHT), I32(STAGES))
        pl.when(done >= PIECES_IN_FLIGHT)(lambda: plgpu.barrier_arrive(call.free.at[read]))

    _for_each_piece(call, send)
    plgpu.wait_smem_to_gmem(0)
    for device in devices:
        synchronisation.announce_copies(call.arrivals, device)
    synchronisation.wait_for_stores(call.arrivals, others * call.num_blocks)
