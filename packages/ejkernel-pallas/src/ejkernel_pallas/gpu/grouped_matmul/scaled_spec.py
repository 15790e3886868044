"""Tiles of the kernel for operands of 8 bits with scales, and what it takes."""

import jax
import jax.numpy as jnp
from jax import lax

from ejkernel.families.grouped_matmul import GroupedMatmul, columns
from ejkernel.ops.device import DeviceInfo
from ejkernel.ops.params import Direction, given_values
from ejkernel_pallas.gpu.grouped_matmul.spec import (
    BLOCK_M,
    COPIED_BLOCKS,
    LINE,
    RESERVE,
    WARPGROUPS,
    GroupedSpec,
    HopperGrouped,
    HopperScaled,
    Scaling,
    Tile,
)
from ejkernel_pallas.gpu.hopper.sizes import SHARED_MEMORY, SWIZZLE_COLUMNS, WGMMA_M

FLOAT8 = "float8_e4m3fn"
"""Dtype of rows and matrices."""
STEP = LINE
"""Contracted elements a step: a swizzled row of 8 bits."""
MOST_COLUMNS = 256
"""Columns of a tile whose scales one copy takes, and whose sums a warpgroup has registers for."""
FACES = {"block_n": "block_n", "num_stages": "stages"}
"""Public configuration field -> field of `HopperScaled`."""


def _tile(n: int, stages: int, slots: int, *, by_columns: bool = False, dynamic: bool = False) -> HopperScaled:
    fields = {"block_n": n, "product_n": 128, "stages": stages, "slots": slots, "band": 16}
    return HopperScaled(**fields, by_columns=by_columns, dynamic=dynamic)


BY_COLUMNS = _tile(256, 3, 4, by_columns=True, dynamic=True)
"""A warpgroup for each half of the columns, and a counter of tiles.

On one H100, times bfloat16's speed, beside `BY_ROWS`: M65536 K2048 N1536 G128 1.61 and 1.45 with scales of 128 x 128,
1.23 and 1.12 with one a column in every block; M32768 K2048 N1408 G64 1.53 and 1.43, 1.28 and 1.17; M32768 K7168 N4096
G32 1.72 and 1.68, 1.22 and 1.16. With scales of rows and columns 1.73, 1.66 and 1.77; by rows 1.61, 1.58 and 1.80.
"""
BY_ROWS = _tile(256, 3, 4)
QUICK = (BY_ROWS, _tile(256, 4, 1), BY_COLUMNS)
"""Where tensor cores may sum over all contracted elements. The last does not leave it to them, and is 5% faster in the
first of these shapes and 5% slower in the last."""


def heuristic(record: GroupedMatmul, device: DeviceInfo, direction: Direction) -> HopperScaled:
    """The configuration of a call without a chosen or tuned one."""
    return candidates(record, device, direction)[0]


def candidates(record: GroupedMatmul, device: DeviceInfo, direction: Direction) -> tuple[HopperScaled, ...]:
    """The configurations worth measuring, the best first."""
    return QUICK if quick(record) else (BY_COLUMNS, BY_ROWS)


def make_scaled_spec(record: GroupedMatmul, params: HopperScaled) -> GroupedSpec:
    """The constants of the kernel.

    Raises:
        ValueError: A tile size is none that a kernel can have.
    """
    given = given_values(params)
    size, product = params.block_n, params.product_n
    if not 0 < size <= MOST_COLUMNS or size % SWIZZLE_COLUMNS:
        raise ValueError(f"cfg: got block_n={size}, wants a multiple of {SWIZZLE_COLUMNS} up to {MOST_COLUMNS}")
    # An output part of 16 bits has 64 columns, of 32 bits 32.
    part = LINE // jnp.dtype(record.out_dtype).itemsize
    if product <= 0 or product % part or size % product:
        raise ValueError(f"cfg: got product_n={product}, wants a divisor of block_n={size} and a multiple of {part}")
    if params.stages < 2 or params.slots < 1 or params.band < 1:
        raise ValueError(f"cfg: got {given}, wants at least 2 stages, a slot and a band of 1")
    if shared_bytes(params) > SHARED_MEMORY - RESERVE:
        raise ValueError(f"cfg: {given} takes more than the {SHARED_MEMORY} bytes of shared memory")
    assert record.lhs_scale is not None  # the kernel's requirements
    assert record.rhs_scale is not None
    by_columns = params.by_columns and size == WARPGROUPS * product
    return GroupedSpec(
        rows=record.lhs.shape[0],
        contracted=record.lhs.shape[1],
        columns=columns(record),
        matrices=record.rhs.shape[0],
        transposed=True,
        dtype=jnp.dtype(record.lhs.dtype),
        out=jnp.dtype(record.out_dtype),
        tile=HopperGrouped(**Tile(size, params.stages, params.slots, params.band).fields),
        scaling=Scaling(
            lhs_blocks=record.lhs_scale.shape[1],
            rhs_blocks=record.rhs_scale.shape[1],
            product_n=product,
            quick=quick(record) and not by_columns,
            by_columns=by_columns,
            dynamic=params.dynamic,
        ),
    )


def quick(record: GroupedMatmul) -> bool:
    """Whether tensor cores may sum over all contracted elements: scales do not change on the way, nor has the caller
    asked for more digits than they have."""
    assert record.lhs_scale is not None  # the kernel's requirements
    assert record.rhs_scale is not None
    one = record.lhs_scale.shape[1] == record.rhs_scale.shape[1] == 1
    return one and record.precision == lax.Precision.DEFAULT


def share_scales(scales: jax.Array, product_n: int) -> jax.Array:
    """Whether all columns of every product share their scale, int32 [1]: where matrices have scales of 128 x 128.

    Args:
        scales: Float32 [E, blocks, N].
        product_n: Columns of a product.
    """
    size = scales.shape[2]
    scales = jnp.pad(scales, ((0, 0), (0, 0), (0, -size % product_n)), mode="edge")
    products = scales.reshape(*scales.shape[:2], -1, product_n)
    return jnp.all(products == products[..., :1]).astype(jnp.int32)[None]


def shared_bytes(params: HopperScaled) -> int:
    """Shared memory of the kernel, without barriers."""
    scales = (params.stages + 1) * params.block_n * 4
    if params.by_columns:
        scales += params.stages * BLOCK_M * COPIED_BLOCKS * 4
    return params.stages * (BLOCK_M + params.block_n) * STEP + scales + WARPGROUPS * params.slots * WGMMA_M * LINE


def reasons(record: GroupedMatmul) -> list[str]:
    """What `Requires` has no word for."""
    rows, contracted = record.lhs.shape
    found = []
    if str(record.rhs.dtype) != FLOAT8:
        found.append(f"rhs has dtype {record.rhs.dtype}, wants {FLOAT8}")
    if record.lhs_scale is None or record.rhs_scale is None:
        return [*found, "lhs_scale or rhs_scale is None, wants both"]
    if not record.transpose_rhs:
        found.append("matrices lie with their contracted elements first; WGMMA reads 8 bits along them (transpose_rhs)")
    if rows < WGMMA_M:
        found.append(f"{rows} rows are fewer than {WGMMA_M}")
    if columns(record) % SWIZZLE_COLUMNS or not columns(record):
        found.append(f"{columns(record)} columns are not a multiple of {SWIZZLE_COLUMNS}")
    for name, blocks in (("rows", record.lhs_scale.shape[1]), ("matrices", record.rhs_scale.shape[1])):
        if contracted % (blocks * STEP) or not contracted:
            found.append(f"{contracted // blocks} contracted elements a scale of {name} are not a multiple of {STEP}")
    if jnp.dtype(record.out_dtype).itemsize not in (2, 4):
        found.append(f"preferred_element_type {record.out_dtype} is not of 16 or 32 bits")
    return found
