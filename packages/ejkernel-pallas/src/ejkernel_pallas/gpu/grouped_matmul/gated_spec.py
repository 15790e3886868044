"""Tiles of the gated grouped matmul, and what it takes."""

import dataclasses

import jax

from ejkernel.families.gated_grouped_matmul import GatedGroupedMatmul, product_record
from ejkernel.families.grouped_matmul import GroupedMatmul
from ejkernel.families.grouped_matmul.kinds import average_rows
from ejkernel.ops.device import DeviceInfo
from ejkernel.ops.params import Direction
from ejkernel_pallas.gpu.grouped_matmul import spec
from ejkernel_pallas.gpu.grouped_matmul.spec import Gate, GroupedSpec, HopperGrouped
from ejkernel_pallas.gpu.hopper.row_gathers import LARGEST
from ejkernel_pallas.gpu.hopper.sizes import SWIZZLE_COLUMNS


@dataclasses.dataclass(frozen=True, kw_only=True)
class HopperGated:
    """Configuration of rows.py for a gated product (gated.py).

    Attributes:
        block_n: Columns of a tile of the output; as many of the gate and of the others are multiplied.
        stages: Pipeline stages: steps whose operands are in shared memory.
        slots: Parts of a warpgroup's output, of 64 rows, that are in shared memory on their way out.
        band: Tiles of rows that are gone down before the next column.
        alone: Whether one warpgroup alone multiplies tiles of at most 64 rows.
    """

    block_n: int
    stages: int
    slots: int
    band: int
    alone: bool


FACES = {"block_n": "block_n", "num_stages": "stages"}
"""Public configuration field -> field of `HopperGated`."""


def _tile(n: int, stages: int, slots: int, band: int, *, alone: bool = False) -> HopperGated:
    return HopperGated(block_n=n, stages=stages, slots=slots, band=band, alone=alone)


TILES = (_tile(128, 4, 2, 16), _tile(128, 4, 2, 24), _tile(128, 4, 2, 8), _tile(64, 6, 1, 8))
"""Tiles, the best first.

On an H200, M65536 K2048 F768 G128, gathered: the first two 0.725 and 0.710 ms in one run, the first and the third 0.698
and 0.736 in another. The last has been compared there, not timed.
"""
ALONE = tuple(dataclasses.replace(tile, alone=True) for tile in TILES[:1])
"""Tiles where groups have few rows: 0.240 ms with 32 a group instead of 0.253, and 0.748 with 512 instead of 0.725."""
FEW_ROWS = 64
"""Rows of a group in the mean up to which they are few."""
FEWEST_ROWS = 32
"""Rows of a group in the mean from which on the kernel comes before Triton's.

On an H200, K2048 F768 G128: with 4 rows a group 0.250 ms, where Triton's kernel takes 0.235; with 32, 0.240 and 0.268.
"""


def heuristic(record: GatedGroupedMatmul, device: DeviceInfo, direction: Direction) -> HopperGated:
    """The configuration of a call without a chosen or tuned one."""
    return candidates(record, device, direction)[0]


def candidates(record: GatedGroupedMatmul, device: DeviceInfo, direction: Direction) -> tuple[HopperGated, ...]:
    """The configurations worth measuring, the best first."""
    few = average_rows(product_of(record)) <= FEW_ROWS
    return (*ALONE, *TILES) if few else (*TILES, *ALONE)


def product_of(record: GatedGroupedMatmul) -> GroupedMatmul:
    """The product's record, with the shape of rows that are nowhere in memory."""
    rows = (record.lhs if record.indices is None else record.indices).shape[0]
    return product_record(record, jax.ShapeDtypeStruct((rows, record.lhs.shape[1]), record.lhs.dtype), record.lhs.dtype)


def make_gated_spec(record: GatedGroupedMatmul, params: HopperGated) -> GroupedSpec:
    """The constants of the kernel.

    Raises:
        ValueError: A tile size is none that a kernel can have.
    """
    if params.block_n not in (64, 128):
        raise ValueError(f"cfg: got block_n={params.block_n}, the gated Mosaic GPU kernel wants 64 or 128")
    product = product_of(record)
    # Shared memory has both halves of the columns side by side.
    tile = HopperGrouped(**spec.Tile(2 * params.block_n, params.stages, params.slots, params.band).fields)
    made = spec.make_spec(product, tile, record.lhs.dtype)
    return dataclasses.replace(
        made,
        columns=made.columns // 2,
        tile=dataclasses.replace(tile, block_n=params.block_n),
        gate=Gate(activation=record.activation, gathers=record.indices is not None, alone=params.alone),
    )


def reasons(record: GatedGroupedMatmul) -> list[str]:
    """What `Requires` has no word for."""
    product, size = product_of(record), record.lhs.size * record.lhs.dtype.itemsize
    found = spec.reasons(product)
    half = record.rhs.shape[2] // 2
    if half % SWIZZLE_COLUMNS:
        found.append(f"{half} columns of the output are not a multiple of {SWIZZLE_COLUMNS}")
    if record.indices is not None and size > LARGEST:
        found.append(f"lhs has {size} bytes, more than the {LARGEST} that gathered rows may lie in")
    return found


def priority(record: GatedGroupedMatmul, device: DeviceInfo, direction: Direction) -> int:
    """Above Triton's 10: an expert layer of 65536 rows takes 1.20 ms forward instead of 1.31.

    With fewer rows a group Triton's tiles have fewer, and no chip has run the suite's cases with this kernel.
    """
    return 20 if average_rows(product_of(record)) >= FEWEST_ROWS else -1
