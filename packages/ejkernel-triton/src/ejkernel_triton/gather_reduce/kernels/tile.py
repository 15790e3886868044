"""Device helpers of the gather-reduce kernels: where a program is, and rows by index."""

import triton
import triton.language as tl


@triton.jit
def program_tile(spec: tl.constexpr):
    """Returns batch row, sums [BLOCK_T] and channels [BLOCK_D] of this program."""
    program = tl.program_id(0)
    # Tiles of one block are neighbours: they look up the same indices.
    tile = program % spec.TILES
    block = program // spec.TILES % spec.BLOCKS
    row = tl.cast(program // (spec.TILES * spec.BLOCKS), tl.int64)
    return (
        row,
        tile,
        block * spec.BLOCK_T + tl.arange(0, spec.BLOCK_T),
        tile * spec.BLOCK_D + tl.arange(0, spec.BLOCK_D),
    )


@triton.jit
def load_rows(rows, index, valid, channels, spec: tl.constexpr):
    """Returns [BLOCK_T, BLOCK_D] float32 of named rows; 0 where an index names none."""
    # 64 bits for where a row begins: rows of one tile may be far from each other.
    start = rows + tl.cast(index, tl.int64) * spec.D
    mask = valid[:, None] & (channels < spec.D)[None, :]
    return tl.load(start[:, None] + channels[None, :], mask=mask, other=0.0).to(tl.float32)
