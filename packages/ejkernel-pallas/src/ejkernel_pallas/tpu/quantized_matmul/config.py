"""Tile sizes: the heuristic for calls without a measured configuration, and the candidates."""

import dataclasses
from typing import Any

from ejkernel.arithmetic import cdiv
from ejkernel.families.quantized_matmul import FAMILY, QuantizedMatmul
from ejkernel.ops.params import Direction
from ejkernel.planning.fixed_sizes import with_fixed_sizes
from ejkernel.planning.quantized_formats import WORD_BITS
from ejkernel_pallas.tpu.mosaic.vectors import LANES

ROW_PADDING_MULTIPLE = 16
"""Rows of x are padded to a multiple of this: whole registers of bfloat16."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TpuQuantized:
    """The configuration of both kernels; tiles are tiles of the packed matrix in its memory layout.

    Attributes:
        block_m: Rows of x per tile, a multiple of 16.
        block_r: Rows of packed weights per tile, a multiple of 128.
        block_w: Words of packed weights per tile, a multiple of 128.
        batch_invariant: Whether calls with few rows have whole tiles of rows, and dequantize as calls with many do.
    """

    block_m: int
    block_r: int
    block_w: int
    batch_invariant: bool = False


PUBLIC_FIELDS = {name: name for name in ("block_m", "block_r", "block_w")}
"""Maps fields of the public configuration to fields of this one."""

ROW_CONTRACTION_TILE_SIZES = ((1024, 256), (512, 256), (512, 512), (256, 256), (256, 128))
"""Rows and words per tile of the kernel that contracts rows of the packed matrix."""
WORD_CONTRACTION_TILE_SIZES = ((512, 512), (256, 512), (256, 1024), (256, 256), (128, 256))
"""Rows and words per tile of the kernel that contracts the codes along words."""
MAX_BLOCK_VMEM_BYTES = 32 * 2**20
"""The most VMEM for blocks and the accumulator: available on every chip, with room for the compiler."""

MAX_MULTIPLICATIONS_PER_TILE = 2**30
"""The largest number of multiplications per tile. Its products are unrolled, and libtpu takes minutes to compile
more.
"""


def heuristic(record: QuantizedMatmul, device: Any, direction: Direction) -> TpuQuantized:
    """Returns the tiles for a record on a device, found with the static profile."""
    return candidates(record, device, direction)[0]


FIXED_ROWS = LANES
"""Rows of the call whose configuration serves all calls in a `batch_invariant` block."""


def batch_invariant(record: QuantizedMatmul, device: Any, direction: Direction) -> TpuQuantized:
    """Returns the tiles for all calls in a `batch_invariant` block."""
    record = with_fixed_sizes(record, FAMILY.axes_of(record), {"m": FIXED_ROWS})
    return dataclasses.replace(heuristic(record, device, direction), batch_invariant=True)


def candidates(record: QuantizedMatmul, device: Any, direction: Direction) -> tuple[TpuQuantized, ...]:
    """Returns tiles worth measuring for a record on a device."""
    contracts_rows = record.transpose == (direction == "backward")
    rows, words = (cdiv(size, LANES) * LANES for size in record.packed.shape)
    height = cdiv(record.x.shape[0], ROW_PADDING_MULTIPLE) * ROW_PADDING_MULTIPLE
    tiles = [
        TpuQuantized(block_m=min(m, height), block_r=min(r, rows), block_w=min(w, words))
        for m in (1024, 512, 256, 128)
        for r, w in (ROW_CONTRACTION_TILE_SIZES if contracts_rows else WORD_CONTRACTION_TILE_SIZES)
    ]
    codes = WORD_BITS // record.format.bits
    quick = [x for x in tiles if x.block_m * x.block_r * x.block_w * codes <= MAX_MULTIPLICATIONS_PER_TILE]
    fitting = [x for x in quick if _block_vmem_bytes(record, x, contracts_rows) <= MAX_BLOCK_VMEM_BYTES]
    return tuple(dict.fromkeys(fitting or tiles[-1:]))


def _block_vmem_bytes(record: QuantizedMatmul, tiles: TpuQuantized, contracts_rows: bool) -> int:
    """Returns the bytes of the double-buffered blocks and of the sum."""
    m, r, w = tiles.block_m, tiles.block_r, tiles.block_w
    columns, item = w * (WORD_BITS // record.format.bits), record.x.dtype.itemsize
    packed = r * w * 4 + 2 * r * LANES * 4
    depth, width = (r, columns) if contracts_rows else (columns, r)
    return 2 * (packed + m * depth * item + m * width * item) + 4 * m * width
