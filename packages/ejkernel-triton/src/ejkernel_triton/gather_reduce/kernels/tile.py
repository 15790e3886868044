"""Device helpers of the gather-reduce kernels: the program's tile, and loads of rows by index."""

import triton
import triton.language as tl


@triton.jit
def locate_program(spec: tl.constexpr):
    """Returns the batch row, the index of the tile of channels, the sums [BLOCK_T] and the channels [BLOCK_D] of this
    program.
    """
    program = tl.program_id(0)
    # Consecutive programs are tiles of one block, which read the same indices.
    tile = program % spec.NUM_CHANNEL_TILES
    block = program // spec.NUM_CHANNEL_TILES % spec.NUM_BLOCKS
    row = tl.cast(program // (spec.NUM_CHANNEL_TILES * spec.NUM_BLOCKS), tl.int64)
    return (
        row,
        tile,
        block * spec.BLOCK_T + tl.arange(0, spec.BLOCK_T),
        tile * spec.BLOCK_D + tl.arange(0, spec.BLOCK_D),
    )


@triton.jit
def load_rows_by_index(rows, index, valid, channels, spec: tl.constexpr):
    """Loads rows by index, [BLOCK_T, BLOCK_D] float32; 0 for an index out of range."""
    # The address of a row has 64 bits: rows of one tile may be far apart.
    start = rows + tl.cast(index, tl.int64) * spec.D
    mask = valid[:, None] & (channels < spec.D)[None, :]
    return tl.load(start[:, None] + channels[None, :], mask=mask, other=0.0).to(tl.float32)
