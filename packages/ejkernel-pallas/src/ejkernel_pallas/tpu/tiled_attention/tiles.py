"""Tile sizes: which are used when nobody chose, and which are worth measuring."""

from typing import Any

from ejkernel.families.tiled_attention import TiledAttention, band
from ejkernel.ops.config.params import BwdParams, Direction, FwdParams
from ejkernel_pallas.tpu.tiled_attention.spec import LANES, Blocks

READS = frozenset({"q_blocksize", "kv_blocksize", "blocksize_m", "blocksize_n", "blocksize_k"})
"""Fields of the configuration that the kernels look at."""

WIDE = ("v6", "7x")
"""What the kinds of chips have in their names whose matrix units are 256 wide."""


def forward_blocks(params: FwdParams) -> Blocks:
    """Tiles of the forward kernel."""
    queries, keys = params.q_blocksize or 1024, params.kv_blocksize or 1024
    return Blocks(queries, keys, params.blocksize_m or 512, params.blocksize_n or 512)


def backward_blocks(params: BwdParams) -> tuple[Blocks, Blocks]:
    """Tiles of the kernel that owns keys, and of the one that owns queries."""
    own = (params.q_blocksize or 1024, params.kv_blocksize or 1024)
    visited = (params.blocksize_m or 1024, params.blocksize_n or 1024)
    chunk = params.blocksize_k or 256
    return Blocks(*own, own[0], chunk), Blocks(*visited, chunk, visited[1])


def heuristic(record: TiledAttention, device: Any, direction: Direction) -> FwdParams | BwdParams:
    """Tile sizes for a record on a device, by the static profile of causal attention.

    Large tiles hide what a tile costs to begin; a narrow band, and arrays of pairs, want smaller ones. Products of many
    queries and few keys keep a wide matrix unit busy, squarer ones a narrow one.
    """
    narrow = None not in band(record) or record.bias is not None or record.mask is not None
    block = 512 if narrow else 1024
    if any(word in device.kind for word in WIDE):
        if direction == "forward" and not narrow and _is_long(record):
            return _params(record, direction, (2048, 2048), (1024, 256))
        return _params(record, direction, (block, block), (block, 256))
    return _params(record, direction, (block, block), (512, 512))


def candidates(record: TiledAttention, device: Any, direction: Direction) -> tuple[FwdParams | BwdParams, ...]:
    """Tile sizes worth measuring for a record on a device."""
    tiles = ((512, 512), (512, 1024), (1024, 512), (1024, 1024), (2048, 2048))
    chunks = ((256, 1024), (512, 512), (1024, 256), (1024, 512))
    made = (_params(record, direction, tile, chunk) for tile in tiles for chunk in chunks)
    return tuple(dict.fromkeys(made))


def _is_long(record: TiledAttention) -> bool:
    """Whether there are tiles of 2048 queries and keys enough, which take seconds to compile, and room for them."""
    (_, queries, _, size), (_, keys, _, value_size) = record.query.shape, record.value.shape
    return min(queries, keys) >= 4096 and max(size, value_size) <= 128 and record.query.dtype.itemsize == 2


def _params(
    record: TiledAttention, direction: Direction, tile: tuple[int, int], chunk: tuple[int, int]
) -> FwdParams | BwdParams:
    """Sizes clamped to what covers the lengths."""
    queries, keys = (
        min(size, -(-x.shape[1] // LANES) * LANES) for size, x in zip(tile, (record.query, record.key), strict=True)
    )
    if direction == "forward":
        return FwdParams(
            q_blocksize=queries,
            kv_blocksize=keys,
            blocksize_m=min(chunk[0], queries),
            blocksize_n=min(chunk[1], keys),
        )
    return BwdParams(
        q_blocksize=queries,
        kv_blocksize=keys,
        blocksize_m=queries,
        blocksize_n=keys,
        blocksize_k=min(256, queries, keys),
    )
