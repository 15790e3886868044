"""Tile sizes: the heuristic for calls without a measured configuration, and the tuner's candidates."""

import dataclasses
from typing import Any

from ejkernel.arithmetic import cdiv
from ejkernel.families.tiled_attention import FAMILY, TiledAttention, causal_window_bounds
from ejkernel.families.tiled_attention import kinds as attention_kinds
from ejkernel.families.tiled_attention.mask_functions import mask_function_as_window
from ejkernel.ops.params import Direction
from ejkernel.planning.fixed_sizes import with_fixed_sizes
from ejkernel_pallas.tpu.generations import has_256_wide_mxu, is_v7x
from ejkernel_pallas.tpu.mosaic.vectors import LANES
from ejkernel_pallas.tpu.tiled_attention.spec import TileSizes, pad_head_dim


@dataclasses.dataclass(frozen=True, kw_only=True)
class TpuForward:
    """The configuration of the forward kernel; all sizes are multiples of 128.

    Attributes:
        block_q: Queries per tile.
        block_kv: Keys per tile.
        chunk_q: Queries per product.
        chunk_kv: Keys per product.
        batch_invariant: Whether all products of all calls have the sizes of a chunk.
    """

    block_q: int = 1024
    block_kv: int = 1024
    chunk_q: int = 512
    chunk_kv: int = 512
    batch_invariant: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class GradientTile:
    """Tile sizes of one of the backward kernels; multiples of 128.

    Attributes:
        block_q: Queries per tile.
        block_kv: Keys per tile.
    """

    block_q: int = 1024
    block_kv: int = 1024


@dataclasses.dataclass(frozen=True, kw_only=True)
class TpuBackward:
    """The configuration of the backward kernels.

    Attributes:
        dkv: Tiles of the kernel that accumulates the gradients of keys and values.
        dq: Tiles of the kernel that accumulates the gradient of queries, and of the kernel of the bias gradient.
        chunk: Rows per product: rows of the accumulated tile where tiles are small, of the other tile where they are
            large; a multiple of 128.
    """

    dkv: GradientTile = GradientTile()
    dq: GradientTile = GradientTile()
    chunk: int = 256


PUBLIC_FIELDS = {
    "q_blocksize": ("block_q", "dkv.block_q", "dq.block_q"),
    "kv_blocksize": ("block_kv", "dkv.block_kv", "dq.block_kv"),
}
"""Maps fields of the public configuration to fields of the kernels' configurations. A public size sets the size of both
backward kernels.
"""

TileShape = tuple[int, int]
"""The queries and keys of a tile or of a chunk."""

LARGE_TILE_SIZE = 2048
"""Queries, and keys, of the largest tiles, whose prologue and epilogue take the smallest share of the time."""
LARGE_TILE_MIN_LENGTH = 2 * LARGE_TILE_SIZE
"""Smallest number of queries and keys for which the largest tiles are numerous enough."""


def forward_blocks(config: TpuForward) -> TileSizes:
    """Returns the tiles of the forward kernel; a chunk is no larger than its tile."""
    queries, keys = config.block_q, config.block_kv
    chunk = min(config.chunk_q, queries), min(config.chunk_kv, keys)
    return TileSizes(queries, keys, *chunk, batch_invariant=config.batch_invariant)


def backward_blocks(config: TpuBackward) -> tuple[TileSizes, TileSizes]:
    """Returns the tiles of the kernel that accumulates for keys, and those of the kernel that accumulates for
    queries.

    A product of a small tile takes `chunk` rows of the accumulated tile and all of the other. A product of a large
    tile, whose chunks are processed in a loop, takes half of the accumulated tile and `chunk` rows of the other. With
    the chunks exchanged, either would spill.
    """
    dkv, dq = ((tile.block_q, tile.block_kv) for tile in (config.dkv, config.dq))
    chunk = min(config.chunk, *dkv, *dq)
    by_key = (dkv[0], chunk) if dkv[1] < LARGE_TILE_SIZE else (chunk, LARGE_TILE_SIZE // 2)
    by_query = (chunk, dq[1]) if dq[0] < LARGE_TILE_SIZE else (LARGE_TILE_SIZE // 2, chunk)
    return TileSizes(*dkv, *by_key), TileSizes(*dq, *by_query)


def heuristic(
    record: TiledAttention, device: Any, direction: Direction, max_head_dim: int = 2 * LANES
) -> TpuForward | TpuBackward:
    """Returns tile sizes for a record on a device, found with the static profile of causal attention.

    Large tiles amortise the start of a tile. Narrow bands, patterns, and arrays of pairs run faster with smaller ones,
    and for float32, which needs six passes per product, large tiles take the compiler minutes. Products of 256 keys
    fill a wide matrix unit, whatever the head dimension. With a narrow matrix unit, squarer products fit the registers,
    and large tiles for heads of more than 128 gain too little for their compile time.

    Args:
        record: The arguments of a call.
        device: The device to run on.
        direction: Forward or backward.
        max_head_dim: The largest head dimension for which VMEM has room for large tiles.
    """
    record = mask_function_as_window(record)
    wide, v7x = has_256_wide_mxu(device.kind), is_v7x(device.kind)
    block = 512 if prefers_small_tiles(record) else 1024
    large = _can_have_large_tiles(record, max_head_dim if wide else LANES)
    if direction == "backward":
        return _backward_config(
            record, LARGE_TILE_SIZE if large and not v7x else block, LARGE_TILE_SIZE if large else block, 256
        )
    if not wide:
        return _forward_config(record, LARGE_TILE_SIZE if large else block, (512, 512))
    return _forward_config(record, LARGE_TILE_SIZE if large else block, (1024 if large and not v7x else 512, 256))


FIXED_LENGTH = 1024
"""Queries and keys of the call whose configuration serves all calls in a `batch_invariant` block."""


def batch_invariant(record: TiledAttention, device: Any, direction: Direction) -> TpuForward:
    """Returns the tiles for all calls in a `batch_invariant` block: products have 128 queries, since a call may have
    one, and a tile has as many of them as a call needs.
    """
    sizes = dict.fromkeys("ts", FIXED_LENGTH)
    tiles: Any = heuristic(with_fixed_sizes(record, FAMILY.axes_of(record), sizes), device, "forward")
    return dataclasses.replace(tiles, chunk_q=LANES, batch_invariant=True)


def candidates(
    record: TiledAttention, device: Any, direction: Direction
) -> tuple[TpuForward, ...] | tuple[TpuBackward, ...]:
    """Returns tile sizes worth measuring for a record on a device."""
    record = mask_function_as_window(record)
    small, large = (
        (512, 1024)
        if prefers_small_tiles(record) or min(_clamp_tile_size(record, LARGE_TILE_MIN_LENGTH)) < LARGE_TILE_MIN_LENGTH
        else (1024, LARGE_TILE_SIZE)
    )
    if direction == "backward":
        pairs = [(dkv, dq) for dkv in (small, large) for dq in (small, large)]
        return tuple(dict.fromkeys(_backward_config(record, *pair, 256) for pair in pairs))
    chunks = ((512, 256), (1024, 256), (512, 512))
    return tuple(dict.fromkeys(_forward_config(record, tile, chunk) for tile in (small, large) for chunk in chunks))


def tuned_table_key(record: TiledAttention) -> str | None:
    """Returns a key that long calls share if one entry of a shipped table serves them; None for others, which use
    the rule.

    A head of 64 is padded to 128 by the kernels.
    """
    record = mask_function_as_window(record)
    long = min(record.query.shape[1], record.key.shape[1]) >= LARGE_TILE_MIN_LENGTH
    return attention_kinds.call_kind(record, pad_head_dim) if long else None


def prefers_small_tiles(record: TiledAttention) -> bool:
    """Returns whether small tiles are faster."""
    arrays = (record.bias, record.mask, record.pattern)
    return (
        None not in causal_window_bounds(record)
        or not all(x is None for x in arrays)
        or record.query.dtype.itemsize > 2
    )


def _can_have_large_tiles(record: TiledAttention, max_head_dim: int) -> bool:
    """Returns whether there are enough large tiles without a remainder, VMEM has room for them, and there are no
    segments and functions of pairs.
    """
    (_, queries, _, size), (_, keys, _, value_size) = record.query.shape, record.value.shape
    arrays = (record.q_segment_ids, record.q_positions, record.kv_positions, record.score_mod, record.mask_mod)
    if prefers_small_tiles(record) or not all(x is None for x in arrays):
        return False
    return (
        min(queries, keys) >= LARGE_TILE_MIN_LENGTH
        and queries % LARGE_TILE_SIZE == keys % LARGE_TILE_SIZE == 0
        and max(size, value_size) <= max_head_dim
    )


def _forward_config(record: TiledAttention, tile: int, chunk: TileShape) -> TpuForward:
    queries, keys = _clamp_tile_size(record, tile)
    return TpuForward(block_q=queries, block_kv=keys, chunk_q=min(chunk[0], queries), chunk_kv=min(chunk[1], keys))


def _backward_config(record: TiledAttention, dkv: int, dq: int, chunk: int) -> TpuBackward:
    (queries, keys), (rows, columns) = _clamp_tile_size(record, dkv), _clamp_tile_size(record, dq)
    return TpuBackward(
        dkv=GradientTile(block_q=queries, block_kv=keys),
        dq=GradientTile(block_q=rows, block_kv=columns),
        chunk=min(chunk, queries, keys),
    )


def _clamp_tile_size(record: TiledAttention, size: int) -> TileShape:
    """Returns a tile no larger than needed to cover the lengths."""
    queries, keys = (min(size, cdiv(x.shape[1], LANES) * LANES) for x in (record.query, record.key))
    return queries, keys
