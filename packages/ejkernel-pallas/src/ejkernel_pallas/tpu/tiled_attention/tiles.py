"""Tile sizes: which are used when nobody chose, and which are worth measuring."""

from typing import Any

from ejkernel.families.tiled_attention import TiledAttention, band
from ejkernel.ops.config.params import BwdParams, Direction, FwdParams
from ejkernel_pallas.tpu.tiled_attention.spec import LANES, Blocks

READS = frozenset({"q_blocksize", "kv_blocksize", "blocksize_m", "blocksize_n", "blocksize_k"})
"""Fields of the configuration that the kernels look at."""

WIDE = ("v6", "7x")
"""What the kinds of chips have in their names whose matrix units are 256 wide."""
SLOW = "7x"
"""The one among them for which the compiler takes ten times as long for the largest tiles."""

LISTED = 2**17
"""Tile pairs whose list takes half of scalar memory."""
MOST = 2**14
"""Tiles of queries, and twice the tiles of keys, that an entry of the list has bits for."""


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

    Large tiles hide what a tile costs to begin; a narrow band, a pattern, and arrays of pairs want smaller ones, and of
    float32, whose products are six, they take the compiler minutes.
    Products of 256 keys fill a wide matrix unit, whatever the head size; a narrow one has registers for squarer ones.
    """
    narrow = _is_narrow(record)
    block = 512 if narrow else 1024
    if not any(word in device.kind for word in WIDE):
        return _params(record, direction, (block, block), (512, 512))
    if narrow:
        return _params(record, direction, (block, block), (block, 256))
    if SLOW in device.kind:
        return _params(record, direction, (block, block), (1024, 512))
    if direction == "forward" and _is_long(record):
        return _params(record, direction, (2048, 2048), (1024, 256))
    return _params(record, direction, (block, block), (512, 256))


def candidates(record: TiledAttention, device: Any, direction: Direction) -> tuple[FwdParams | BwdParams, ...]:
    """Tile sizes worth measuring for a record on a device."""
    tiles = ((512, 512), (512, 1024), (1024, 512), (1024, 1024), (2048, 2048))
    chunks = ((256, 256), (512, 512), (512, 256), (1024, 256), (1024, 512))
    made = (_params(record, direction, tile, chunk) for tile in tiles for chunk in chunks)
    return tuple(dict.fromkeys(made))


def reasons(record: TiledAttention) -> tuple[str, ...]:
    """Why the list of a record's tile pairs does not fit scalar memory, at the tiles that it gets by default."""
    block = 512 if _is_narrow(record) else 1024
    (left, right), arrays = band(record), (record.q_segment_ids, record.q_positions, record.kv_positions)
    queries, keys = (-(-x.shape[1] // block) for x in (record.query, record.key))
    if any(x is not None for x in arrays):
        pairs = queries * keys * max(x.shape[0] for x in arrays if x is not None)
    elif left is not None and right is not None:
        pairs = queries * min(keys, (left + right) // block + 2)
    else:
        pairs = queries * keys if (left, right) == (None, None) else queries * (keys + 1) // 2
    if max(queries, 2 * keys) > MOST:
        return (
            f"{queries} tiles of queries and {keys} of keys are more than {MOST}, or {MOST // 2}, that are told apart",
        )
    return (f"{pairs} tile pairs are more than the {LISTED} that scalar memory lists",) if pairs > LISTED else ()


def _is_narrow(record: TiledAttention) -> bool:
    """Whether small tiles are better."""
    arrays = (record.bias, record.mask, record.pattern)
    return None not in band(record) or not all(x is None for x in arrays) or record.query.dtype.itemsize > 2


def _is_long(record: TiledAttention) -> bool:
    """Whether there are enough tiles of 2048 queries and keys, and room for them."""
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
