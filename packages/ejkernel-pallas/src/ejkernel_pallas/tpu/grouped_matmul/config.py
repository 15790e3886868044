"""Tile sizes: the heuristic for calls without a measured configuration, and the candidates."""

import dataclasses
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ejkernel.arithmetic import cdiv
from ejkernel.families.gated_grouped_matmul import GatedGroupedMatmul, as_grouped_matmul
from ejkernel.families.grouped_matmul import FAMILY, GroupedMatmul, columns
from ejkernel.ops.chips import MEBI, Tpu, tpu_of
from ejkernel.ops.params import Direction
from ejkernel.planning.fixed_sizes import with_fixed_sizes
from ejkernel_pallas.tpu.generations import has_256_wide_mxu
from ejkernel_pallas.tpu.mosaic.vectors import LANES, pad_to_lanes


@dataclasses.dataclass(frozen=True, kw_only=True)
class TpuMatmul:
    """The configuration of each kernel; all sizes are multiples of 128.

    Attributes:
        block_m: Rows per tile.
        block_k: Contracted elements per step of the forward pass; rows per tile of a matrix's gradient.
        block_n: Columns per tile.
    """

    block_m: int = 512
    block_k: int = 1024
    block_n: int = 1024


PUBLIC_FIELDS = {"block_m": "block_m", "block_k": "block_k", "block_n": "block_n"}
"""Maps fields of the public configuration to fields of this one."""

MAX_WHOLE_COLUMNS_VMEM_BYTES = 32 * 2**20
"""Bytes of VMEM for a tile that has to have all columns of a matrix."""
TILE_ROW_SIZES = (1024, 512, 256, 128)
MAX_UNROLLED_COLUMNS = 1024
"""Columns of a forward tile whose multiplications are counted in `max_multiplications`; wider tiles have a loop."""


MAX_WORK_LIST_SMEM_BYTES = 2**20 - 2**16
"""Bytes of SMEM for the work list: a chip has 1 MiB, of which the compiler and the pipeline take some."""


class TileLimits(NamedTuple):
    """The limits of tiles on a kind of TPU, in addition to the chip's properties in `ejkernel.ops.chips`.

    Attributes:
        candidate_vmem_bytes: Bytes of VMEM for the blocks of candidates.
        max_multiplications: The largest number of multiplications of a tile: libtpu takes seconds for more, or they
            need a loop.
        default_vmem_bytes: Bytes of VMEM for default blocks: libtpu takes a minute for kernels with more.
    """

    candidate_vmem_bytes: int
    max_multiplications: int = 2**32
    default_vmem_bytes: int = 64 * MEBI


TILE_LIMITS_BY_CHIP = {
    "v5e": TileLimits(60 * MEBI),
    "v5p": TileLimits(36 * MEBI),
    "v6e": TileLimits(64 * MEBI),
    "v7x": TileLimits(44 * MEBI, 2**31, 36 * MEBI),
}
"""The limits of each kind of TPU, by its short name."""


def heuristic(record: GroupedMatmul, device: Any, direction: Direction) -> TpuMatmul:
    """Returns the default tiles for a record on a device: those with the lowest estimate of operations and bytes."""
    tpu = tpu_of(device)
    limits = TILE_LIMITS_BY_CHIP[tpu.name]
    limits = limits._replace(candidate_vmem_bytes=min(limits.candidate_vmem_bytes, limits.default_vmem_bytes))
    return min(_tiles_that_fit(record, limits, direction), key=lambda tiles: _estimate_seconds(record, tpu, tiles))


def gated_heuristic(record: GatedGroupedMatmul, device: Any, direction: Direction) -> TpuMatmul:
    """Returns the tiles of a gated product; columns are those of the output."""
    if direction == "forward" and whole_columns_vmem_bytes(record):
        return _largest_tiles_with_whole_columns(record)
    tiles = heuristic(ungated_product_record(record), device, direction)
    return _halve_columns(tiles) if record.gated and direction == "forward" else tiles


def gated_candidates(record: GatedGroupedMatmul, device: Any, direction: Direction) -> tuple[TpuMatmul, ...]:
    """Returns tiles of a gated product that are worth measuring."""
    if direction == "forward" and whole_columns_vmem_bytes(record):
        return (_largest_tiles_with_whole_columns(record),)
    tiles = candidates(ungated_product_record(record), device, direction)
    return tuple(map(_halve_columns, tiles)) if record.gated and direction == "forward" else tiles


def batch_invariant(record: GroupedMatmul, device: Any, direction: Direction) -> TpuMatmul:
    """Returns the tiles for all calls in a `batch_invariant` block.

    Tiles have as many rows as a subtile of a tile that groups share, so that every product has the same shape.
    """
    sizes = {"m": _fixed_rows(record, device)}
    return heuristic(with_fixed_sizes(record, FAMILY.axes_of(record), sizes), device, direction)


def gated_batch_invariant(record: GatedGroupedMatmul, device: Any, direction: Direction) -> TpuMatmul:
    """Returns the tiles of a gated product for all calls in a `batch_invariant` block."""
    rows = jax.ShapeDtypeStruct((_fixed_rows(record, device), record.lhs.shape[1]), record.lhs.dtype)
    return gated_heuristic(dataclasses.replace(record, lhs=rows, indices=None), device, direction)


def _fixed_rows(record: GroupedMatmul | GatedGroupedMatmul, device: Any) -> int:
    """Returns rows for which tiles have no more rows than the matrix units are wide."""
    return (2 * LANES if has_256_wide_mxu(device.kind) else LANES) * record.group_sizes.shape[0]


def ungated_product_record(record: GatedGroupedMatmul) -> GroupedMatmul:
    """Returns the record of the products, with shapes only."""
    rows = record.lhs.shape[0] if record.indices is None else record.indices.shape[0]
    return as_grouped_matmul(
        record, jax.ShapeDtypeStruct((rows, record.lhs.shape[1]), record.lhs.dtype), record.lhs.dtype
    )


def work_list_smem_bytes(record: GroupedMatmul, tile_rows: int | None = None) -> int:
    """Returns the bytes of SMEM of the work list with tiles of some rows; None for the fewest rows that the heuristic
    chooses.
    """
    rows, matrices = record.lhs.shape[0], record.rhs.shape[0]
    return 6 * 4 * (cdiv(rows, tile_rows or max(LANES, _tile_rows(record) // 2)) + matrices)


def invariance_limits(record: GroupedMatmul | GatedGroupedMatmul) -> Iterator[str]:
    """Yields why the fixed tiles of a `batch_invariant` block, which may have 128 rows, do not serve a record."""
    product = ungated_product_record(record) if isinstance(record, GatedGroupedMatmul) else record
    needed_bytes = work_list_smem_bytes(product, LANES)
    if needed_bytes > MAX_WORK_LIST_SMEM_BYTES:
        yield (
            f"lhs: got {product.lhs.shape[0]} rows, whose work list with fixed tiles takes {needed_bytes} bytes of "
            f"SMEM; the kernels take {MAX_WORK_LIST_SMEM_BYTES}"
        )


def whole_columns_vmem_bytes(record: GatedGroupedMatmul) -> int:
    """Returns the bytes of VMEM of the smallest tile with all columns of a matrix; 0 if tiles may have fewer."""
    width = record.rhs.shape[1 if record.transpose_rhs else 2]
    if not record.gated or record.interleaved or width // 2 % LANES == 0:
        return 0
    return _vmem_bytes(ungated_product_record(record), "forward", LANES, LANES, pad_to_lanes(width))


def _largest_tiles_with_whole_columns(record: GatedGroupedMatmul) -> TpuMatmul:
    """Returns the largest tiles with all columns of a matrix that fit VMEM."""
    product = ungated_product_record(record)
    width, most = pad_to_lanes(columns(product)), (_tile_rows(product), min(1024, pad_to_lanes(product.lhs.shape[1])))
    sizes = [(m, k) for k in (1024, 512, 256, LANES) for m in TILE_ROW_SIZES if m <= most[0] and k <= most[1]]
    fitting_sizes = (
        size for size in sizes if _vmem_bytes(product, "forward", *size, width) <= MAX_WHOLE_COLUMNS_VMEM_BYTES
    )
    m, k = next(fitting_sizes, (LANES, LANES))
    return TpuMatmul(block_m=m, block_k=k, block_n=pad_to_lanes(width // 2))


def _halve_columns(tiles: TpuMatmul) -> TpuMatmul:
    """Returns tiles with the same products, where two columns make one column of the output."""
    return dataclasses.replace(tiles, block_n=pad_to_lanes(max(LANES, tiles.block_n // 2)))


def candidates(record: GroupedMatmul, device: Any, direction: Direction) -> tuple[TpuMatmul, ...]:
    """Returns tiles worth measuring for a record on a device."""
    return tuple(_tiles_that_fit(record, TILE_LIMITS_BY_CHIP[tpu_of(device).name], direction))


def tuned_table_key(record: GroupedMatmul) -> str:
    """Returns the key of a shipped table entry: the matrices' sizes, and the approximate rows of each."""
    fields = (f"lhs={record.lhs.dtype}", f"rhs={record.rhs.dtype}", f"transpose_rhs={record.transpose_rhs}")
    sizes = f"k={record.lhs.shape[1]} n={columns(record)} rows={_tile_rows(record)}"
    return " ".join((*fields, f"out={jnp.dtype(record.out_dtype)}", f"scaled={record.rhs_scale is not None}", sizes))


def _tile_rows(record: GroupedMatmul) -> int:
    """Returns the rows of a tile: about at most the rows of a group."""
    rows_per_group = record.lhs.shape[0] / record.group_sizes.shape[0]
    return next((rows for rows in TILE_ROW_SIZES if rows <= rows_per_group), TILE_ROW_SIZES[-1])


def _tiles_that_fit(record: GroupedMatmul, limits: TileLimits, direction: Direction) -> Iterator[TpuMatmul]:
    """Yields each of the tiles that fit memory once."""
    depth, width, listed_tiles = (
        pad_to_lanes(record.lhs.shape[1]),
        pad_to_lanes(columns(record)),
        set[tuple[int, int, int]](),
    )
    sizes = [(1024, 1024), (2048, 1024), (1024, 2048), (depth, 512), (depth, 1024)]
    if direction == "forward" and _tile_rows(record) == TILE_ROW_SIZES[0]:
        sizes.append((depth, 2048))  # reads rows half as often: with few rows, reading matrices is the bottleneck
    for height in (_tile_rows(record), _tile_rows(record) // 2):
        for k, n in sizes:
            tiles = (min(max(LANES, height), pad_to_lanes(record.lhs.shape[0])), min(k, depth), min(n, width))
            unrolled_columns = tiles[2] if direction == "backward" else min(tiles[2], MAX_UNROLLED_COLUMNS)
            fits_vmem = _vmem_bytes(record, direction, *tiles) <= limits.candidate_vmem_bytes
            fits_vmem = fits_vmem and tiles[0] * tiles[1] * unrolled_columns <= limits.max_multiplications
            if tiles not in listed_tiles and (fits_vmem or not listed_tiles):
                listed_tiles.add(tiles)
                yield TpuMatmul(block_m=tiles[0], block_k=tiles[1], block_n=tiles[2])


def _vmem_bytes(record: GroupedMatmul, direction: Direction, m: int, k: int, n: int) -> int:
    """Returns bytes of the double-buffered blocks and of the sum, in the backward pass for the larger kernel."""
    rows, matrices, out = record.lhs.dtype.itemsize, record.rhs.dtype.itemsize, jnp.dtype(record.out_dtype).itemsize
    if direction == "backward":
        scaled = 2 if record.rhs_scale is None else 6
        dlhs_bytes = 2 * (m * k * rows + m * n * out) + k * n * (scaled * matrices + 4)
        return max(dlhs_bytes, 2 * (m * k * rows + k * n * matrices + m * n * rows) + 4 * m * n)
    existing = 0 if record.existing_out is None else record.existing_out.dtype.itemsize
    return 2 * (m * k * rows + k * n * matrices + m * n * (out + existing)) + 4 * m * n


def _estimate_seconds(record: GroupedMatmul, tpu: Tpu, tiles: TpuMatmul) -> float:
    """Returns the larger of the seconds of products, including padding of tiles, and of copies."""
    (rows, depth), width, groups = record.lhs.shape, columns(record), record.group_sizes.shape[0]
    m, k, n = tiles.block_m, tiles.block_k, tiles.block_n
    column_tiles, steps = cdiv(width, n), cdiv(depth, k)
    items = cdiv(rows, m) + groups / 2
    matrices = record.rhs.shape[0] if steps == 1 else items
    lhs_copy_bytes = column_tiles * items * m * depth * record.lhs.dtype.itemsize
    lhs_copy_bytes += matrices * depth * width * record.rhs.dtype.itemsize
    lhs_copy_bytes += rows * width * jnp.dtype(record.out_dtype).itemsize
    # Starting and ending a tile costs as much as 40 of its contracted elements, and more if it has several steps.
    products = 2 * (rows + groups * min(m, 256) / 2) * steps * (k + 40) * column_tiles * n
    return max(products / tpu.flops, lhs_copy_bytes / tpu.bandwidth)
