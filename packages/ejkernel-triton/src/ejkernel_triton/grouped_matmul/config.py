"""Tile sizes and launch parameters of the grouped-matmul kernels."""

import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from ejkernel.families.grouped_matmul import FAMILY, GroupedMatmul
from ejkernel.families.grouped_matmul.kinds import average_rows_per_group
from ejkernel.ops.chips import KIBI, Gpu, gpu_of
from ejkernel.ops.device import DeviceInfo
from ejkernel.ops.params import Direction
from ejkernel.planning.fixed_sizes import with_fixed_sizes
from ejkernel_triton.grouped_matmul.spec import (
    choose_operand_dtype,
    dequantize_lhs,
    longest_float8_step,
    num_scales_along_contraction,
)
from ejkernel_triton.launch import is_interpreting


@dataclasses.dataclass(frozen=True, kw_only=True)
class GroupedForward:
    """Configuration of `grouped_gemm_kernel`, whose programs compute tiles of the output.

    Attributes:
        block_m: Rows per tile.
        block_n: Columns per tile.
        block_k: Contracted elements per step.
        flatten: Whether the loops over tiles and over steps become one, so that a tile's first copies are in flight
            while the epilogue stores the tile before.
        num_programs: Programs that share the tiles.
        num_warps: Warps per program.
        num_stages: Pipeline stages of the copies of operands.
    """

    block_m: int
    block_n: int
    block_k: int
    flatten: bool
    num_programs: int
    num_warps: int
    num_stages: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class GroupedBackward(GroupedForward):
    """Configuration of the backward pass: the fields of the forward kernel for lhs's gradient, and those of rhs's
    gradient.

    Attributes:
        rhs_block_m: Rows per tile of a matrix's gradient.
        rhs_block_n: Columns per tile of it.
        rhs_block_k: Rows of lhs and of the cotangent per step.
        rhs_num_warps: Warps per program of that kernel.
        rhs_num_stages: Pipeline stages of that kernel.
    """

    rhs_block_m: int
    rhs_block_n: int
    rhs_block_k: int
    rhs_num_warps: int
    rhs_num_stages: int


PUBLIC_FIELDS = {
    "block_m": "block_m",
    "block_n": "block_n",
    "block_k": "block_k",
    "num_warps": "num_warps",
    "num_stages": "num_stages",
}
"""Maps fields of the public configuration to fields of this one."""


class TileChoice(NamedTuple):
    """A tile of m by n, k contracted elements per step, and warps and stages of a kernel."""

    m: int
    n: int
    k: int
    warps: int
    stages: int
    flatten: bool = False


GROUP_M = 8
"""Tile rows per swizzle group (Triton's GROUP_M), whose rows of lhs stay in L2."""

LARGE_TILES = (
    TileChoice(128, 256, 64, 8, 3),
    TileChoice(128, 256, 64, 8, 4),
    TileChoice(128, 128, 64, 4, 3),
    TileChoice(256, 128, 64, 8, 3),
    TileChoice(128, 256, 64, 8, 3, True),
)
"""Tiles of 16-bit operands for groups of many rows, on Hopper and Blackwell; the best first.

On an H200, M65536 K2048 N1536 G128: 577, 556, 511, 424 and 382 TFLOP/s (`grouped_matmul_gpu.py`).
"""
LHS_GRADIENT_TILES = (TileChoice(128, 256, 64, 8, 3, True), *LARGE_TILES[:-1])
"""Tiles for the gradient of lhs, where flattened loops are faster: both gradients at 500 TFLOP/s instead of 452."""
ADDING_EPILOGUE_TILES = (TileChoice(128, 128, 64, 8, 4), TileChoice(128, 256, 64, 8, 3))
"""Tiles if the epilogue adds bias or existing_out: with larger tiles or flattened loops it spills registers."""
RHS_GRADIENT_TILES = (
    TileChoice(128, 256, 64, 8, 3),
    TileChoice(128, 256, 64, 8, 4),
    TileChoice(128, 128, 64, 4, 3),
    TileChoice(256, 128, 64, 8, 3),
)
"""Tiles of `grouped_gemm_drhs_kernel`."""
FLOAT8_TILES = (
    TileChoice(128, 128, 128, 8, 4),
    TileChoice(128, 128, 128, 8, 3),
    TileChoice(128, 128, 64, 8, 4),
    TileChoice(64, 128, 128, 4, 4),
)
"""Tiles of 8-bit operands with a float32 sum of every step, which needs a second accumulator in registers.

The first reaches 655 TFLOP/s on an H200; larger tiles spill (docs/lab/grouped_matmul_gpu.md).
"""
BLOCK_SCALE_TILES = (TileChoice(64, 128, 128, 8, 4), TileChoice(128, 64, 128, 8, 4))
"""Tiles of 8-bit operands with scales of every step, on chips with MMA, whose layouts differ from WGMMA's."""
LOW_PRECISION_FLOAT8_TILES = (
    TileChoice(128, 256, 128, 8, 3),
    TileChoice(128, 256, 128, 8, 4),
    TileChoice(128, 128, 128, 4, 3),
    TileChoice(256, 128, 128, 8, 4),
    TileChoice(128, 256, 64, 8, 5),
)
"""Tiles of 8-bit operands that are summed in the tensor cores' accumulators, with about 14 bits.

On an H200, M65536 K2048 N1536 G128: 984 TFLOP/s with the first, 947 with four stages (docs/lab/grouped_matmul_gpu.md).
"""
SMALL_TILES = {
    64: (TileChoice(64, 128, 64, 4, 4), TileChoice(64, 256, 64, 8, 4), TileChoice(64, 128, 64, 4, 4, True)),
    32: (TileChoice(32, 128, 128, 4, 4), TileChoice(32, 128, 64, 4, 5), TileChoice(32, 64, 128, 4, 4)),
    16: (TileChoice(16, 128, 128, 4, 4), TileChoice(16, 128, 64, 4, 5), TileChoice(16, 64, 128, 4, 5)),
}
"""Tiles by their rows, for groups of few rows, where reading the matrices from HBM is the bottleneck."""


def heuristic(record: GroupedMatmul, device: DeviceInfo, direction: Direction) -> GroupedForward:
    """Returns tile sizes for a record on a device."""
    return candidates(record, device, direction)[0]


FIXED_ROWS_PER_GROUP = 64
"""Average rows of a group in the call whose configuration serves all calls in a `batch_invariant` block."""


def batch_invariant(record: GroupedMatmul, device: DeviceInfo, direction: Direction) -> GroupedForward:
    """Returns tile sizes for calls in a `batch_invariant` block, so that a row is summed in the same steps.

    Hopper sums 16-bit operands in the same steps in all tiles: on an H200, none of 50 million entries differed in six
    tiles of 16 to 128 rows (docs/lab/grouped_matmul_gpu.md).
    """
    if sums_in_equal_steps(record.lhs.dtype, record.rhs.dtype, device):
        return heuristic(record, device, direction)
    rows = FIXED_ROWS_PER_GROUP * record.group_sizes.shape[0]
    return heuristic(with_fixed_sizes(record, FAMILY.axes_of(record), {"m": rows}), device, direction)


def sums_in_equal_steps(lhs: Any, rhs: Any, device: DeviceInfo) -> bool:
    """Returns whether the chip sums products of two dtypes in the same steps in tiles of all sizes."""
    return gpu_of(device).architecture == "hopper" and lhs == rhs and lhs in (jnp.bfloat16, jnp.float16)


def candidates(record: GroupedMatmul, device: DeviceInfo, direction: Direction) -> tuple[GroupedForward, ...]:
    """Returns tile sizes worth measuring for a record on a device, the best first."""
    chip = gpu_of(device)
    step = longest_float8_step(record) if direction == "forward" else 0
    tiles = _float8_tiles(record, step, chip) if step else _gemm_tiles(dequantize_lhs(record), chip, direction)
    if is_interpreting():
        tiles = (TileChoice(32, 32, 32, 4, 1),)
    forward_configs = [_forward_config(tile, chip) for tile in tiles]
    if direction == "forward":
        return tuple(forward_configs)
    matrix_tiles = (
        (TileChoice(64, 32, 32, 4, 1),) if is_interpreting() else _rhs_gradient_tiles(dequantize_lhs(record), chip)
    )
    pairs = [(forward_configs[0], tile) for tile in matrix_tiles] + [
        (forward, matrix_tiles[0]) for forward in forward_configs[1:]
    ]
    return tuple(_backward_config(forward, tile) for forward, tile in pairs)


def _gemm_tiles(record: GroupedMatmul, chip: Gpu, direction: Direction) -> tuple[TileChoice, ...]:
    """Returns tiles of `grouped_gemm_kernel` for operands of 16 and 32 bits."""
    has_epilogue_inputs = record.existing_out is not None or record.rhs_bias is not None
    has_epilogue_inputs = direction == "forward" and (
        has_epilogue_inputs or (_has_float32_output(record) and chip.architecture != "hopper")
    )
    tile_rows = _rows_per_tile(record)
    if _multiplies_float32(record, direction):
        tiles = tuple(TileChoice(min(tile_rows, 64), n, 32, _float32_warps(record), s) for n, s in ((64, 3), (128, 3)))
    elif tile_rows < 128:
        tiles = SMALL_TILES[tile_rows]
    elif record.rhs.dtype.itemsize == 1 or record.rhs_scale is not None:
        # 8-bit matrices are converted in registers before the product, which leaves too few registers for larger tiles.
        tiles = (TileChoice(128, 128, 64, 8, 3), TileChoice(128, 64, 64, 4, 4))
    elif chip.architecture not in ("hopper", "blackwell"):
        tiles = (TileChoice(128, 128, 32, 8 if has_epilogue_inputs else 4, 4), TileChoice(128, 128, 64, 8, 3))
    else:
        tiles = (
            LHS_GRADIENT_TILES
            if direction == "backward"
            else ADDING_EPILOGUE_TILES
            if has_epilogue_inputs
            else LARGE_TILES
        )
    output_itemsize = jnp.dtype(record.out_dtype if direction == "forward" else record.lhs.dtype).itemsize
    fitting_tiles = tuple(_reduce_stages(tile, chip, output_itemsize=output_itemsize) for tile in tiles)
    return tuple(tile for tile in fitting_tiles if tile.stages > 2) or fitting_tiles


def _float8_tiles(record: GroupedMatmul, step_elements: int, chip: Gpu) -> tuple[TileChoice, ...]:
    """Returns tiles of the forward kernel where tensor cores multiply 8-bit operands."""
    tile_rows = _rows_per_tile(record)
    if tile_rows < 128:
        tiles = tuple(tile._replace(k=128) for tile in SMALL_TILES[tile_rows])
    else:
        tiles = LOW_PRECISION_FLOAT8_TILES if record.precision == lax.Precision.DEFAULT else FLOAT8_TILES
        if max(num_scales_along_contraction(record)) > 1:
            tiles = FLOAT8_TILES if chip.architecture == "hopper" else BLOCK_SCALE_TILES
    output_itemsize = jnp.dtype(record.out_dtype).itemsize
    return tuple(
        dict.fromkeys(
            _reduce_stages(tile._replace(k=min(tile.k, step_elements)), chip, 1, output_itemsize) for tile in tiles
        )
    )


def _rows_per_tile(record: GroupedMatmul) -> int:
    """Returns the rows of a tile."""
    rows_per_group = average_rows_per_group(record)
    return next((rows for rows in (16, 32, 64) if rows_per_group <= rows + rows // 2), 128)


def _multiplies_float32(record: GroupedMatmul, direction: Direction) -> bool:
    """Returns whether operands are multiplied in float32."""
    operand_dtypes = () if record.rhs_scale is None else (jnp.float32,)
    operand_dtypes += (record.out_dtype,) if direction == "backward" else ()  # the dtype of the cotangent
    return choose_operand_dtype(record, *operand_dtypes).itemsize > 2


def _has_float32_output(record: GroupedMatmul) -> bool:
    return jnp.dtype(record.out_dtype).itemsize > 2


def _float32_warps(record: GroupedMatmul) -> int:
    """Returns the warps of float32 tiles: products without tensor cores keep operands in registers, so they need
    more.
    """
    return 8 if record.precision == lax.Precision.HIGHEST else 4


def _rhs_gradient_tiles(record: GroupedMatmul, chip: Gpu) -> tuple[TileChoice, ...]:
    """Returns tiles of `grouped_gemm_drhs_kernel`."""
    if _multiplies_float32(record, "backward"):
        tiles = (TileChoice(64, 64, 32, _float32_warps(record), 3), TileChoice(64, 128, 32, 8, 3))
    elif chip.architecture not in ("hopper", "blackwell"):
        tiles = (TileChoice(128, 128, 32, 8, 4), TileChoice(128, 64, 32, 4, 4))
    else:
        tiles = RHS_GRADIENT_TILES
    return tuple(_reduce_stages(tile, chip) for tile in tiles)


def _reduce_stages(tile: TileChoice, chip: Gpu, itemsize: int = 2, output_itemsize: int = 2) -> TileChoice:
    """Returns a tile with at most as many stages as the chip's shared memory holds; AMD's chips have two.

    Args:
        tile: The preferred tile.
        chip: The chip.
        itemsize: Bytes per element of the operands.
        output_itemsize: Bytes per element of the output.
    """
    shared_memory_budget = chip.shared_memory - 2 * KIBI
    stages = min(tile.stages, 2) if chip.vendor == "amd" else tile.stages
    # Operands that are converted before the product take another tile of columns in shared memory.
    while stages > 1 and (stages * (tile.m + tile.n) + tile.n) * tile.k * itemsize > shared_memory_budget:
        stages -= 1
    # In a flattened loop the next tile's operands are copied while this tile's output is in shared memory.
    while (
        tile.flatten
        and stages > 1
        and stages * (tile.m + tile.n) * tile.k * itemsize + tile.m * tile.n * output_itemsize > shared_memory_budget
    ):
        stages -= 1
    return tile._replace(stages=stages)


def _forward_config(tile: TileChoice, chip: Gpu) -> GroupedForward:
    stage_bytes = tile.stages * (tile.m + tile.n) * tile.k * 2
    # Programs per multiprocessor, limited by shared memory and to 16 warps.
    programs_per_sm = max(1, min(chip.shared_memory // max(1, stage_bytes), 16 // tile.warps))
    return GroupedForward(
        block_m=tile.m,
        block_n=tile.n,
        block_k=tile.k,
        flatten=tile.flatten,
        # The interpreter runs programs one after the other; a few suffice to test that they share the tiles.
        num_programs=3 if is_interpreting() else programs_per_sm * chip.multiprocessors,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )


def _backward_config(forward: GroupedForward, tile: TileChoice) -> GroupedBackward:
    return GroupedBackward(
        **dataclasses.asdict(forward),
        rhs_block_m=tile.m,
        rhs_block_n=tile.n,
        rhs_block_k=tile.k,
        rhs_num_warps=tile.warps,
        rhs_num_stages=tile.stages,
    )
