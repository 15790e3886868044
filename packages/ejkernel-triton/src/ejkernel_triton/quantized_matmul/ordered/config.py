"""Configuration of the kernels that add in the matrix's order."""

import dataclasses

from ejkernel.arithmetic import cdiv
from ejkernel.families.quantized_matmul import QuantizedMatmul, columns
from ejkernel.ops.chips import gpu_of
from ejkernel.ops.device import DeviceInfo
from ejkernel.ops.params import Direction
from ejkernel.planning.quantized_formats import WORD_BITS
from ejkernel_triton.grouped_matmul.config import sums_in_equal_steps
from ejkernel_triton.launch import is_interpreting


@dataclasses.dataclass(frozen=True, kw_only=True)
class OrderedTiles:
    """Configuration of the forward pass.

    Attributes:
        block_m: Rows of x per tile. Not read if `dequantize_first`.
        block_r: Rows of packed weights per tile.
        block_w: Words of packed weights per tile.
        num_warps: Warps per program.
        num_stages: Pipeline stages of the copies of x and of packed words. Not read if `dequantize_first`.
        dequantize_first: Whether one kernel dequantises the matrix, and the grouped matmul's kernel multiplies it, in
            its configuration for `batch_invariant` blocks.
    """

    block_m: int
    block_r: int
    block_w: int
    num_warps: int
    num_stages: int
    dequantize_first: bool = False


PUBLIC_FIELDS = {name: name for name in ("block_m", "block_r", "block_w", "num_warps", "num_stages")}
"""Maps fields of the public configuration to fields of this one."""

MAX_FUSED_ROWS = 64
"""Rows of x up to which one kernel dequantises and multiplies, which are its rows per tile, the fewest of WGMMA; for
more, the matrix is dequantised once."""
TILE_COLUMNS = (128, 64, 32)
"""Output columns per tile: the most whose tiles are as many as the chip's multiprocessors."""
CONTRACTED_BYTES = 256
"""Bytes of a row of x per step, which are the contracted elements of a tile."""
DEQUANTIZING_TILE = OrderedTiles(block_m=0, block_r=32, block_w=32, num_warps=4, num_stages=1, dequantize_first=True)
"""The tile of the kernel that dequantises the matrix."""


def heuristic(record: QuantizedMatmul, device: DeviceInfo, direction: Direction) -> OrderedTiles:
    """Returns the tiles for calls in a `batch_invariant` block, and outside of it.

    Hopper adds products of 16-bit operands in the same steps in all tiles that WGMMA multiplies, so there two kernels
    give a row the same bits. MMA does not: for weights that are dequantised in registers, Triton has it multiply other
    elements at a time (docs/lab/batch_invariance.md). Elsewhere, one configuration serves all calls.
    """
    if is_interpreting():
        return OrderedTiles(block_m=16, block_r=32, block_w=8, num_warps=4, num_stages=1)
    is_hopper = sums_in_equal_steps(record.x.dtype, record.x.dtype, device)
    return DEQUANTIZING_TILE if is_hopper and record.x.shape[0] > MAX_FUSED_ROWS else _fused_tiles(record, device)


batch_invariant = heuristic
"""The rule of `batch_invariant` blocks."""


def candidates(record: QuantizedMatmul, device: DeviceInfo, direction: Direction) -> tuple[OrderedTiles, ...]:
    """Returns tiles worth measuring for a record on a device."""
    return (heuristic(record, device, direction),)


def _fused_tiles(record: QuantizedMatmul, device: DeviceInfo) -> OrderedTiles:
    """Returns tiles of the kernel that dequantises and multiplies."""
    multiprocessors, output_columns = gpu_of(device).multiprocessors, columns(record)
    tile_columns = next((x for x in TILE_COLUMNS if cdiv(output_columns, x) >= multiprocessors), TILE_COLUMNS[-1])
    contracted, codes_per_word = CONTRACTED_BYTES // record.x.dtype.itemsize, WORD_BITS // record.format.bits
    block_r, tile_codes = (tile_columns, contracted) if record.transpose else (contracted, tile_columns)
    return OrderedTiles(
        block_m=MAX_FUSED_ROWS,
        block_r=block_r,
        block_w=tile_codes // codes_per_word,
        num_warps=4 if record.transpose else 8,
        num_stages=4 if device.vendor == "nvidia" else 2,
    )
