"""Tile sizes of token-sparse attention: the heuristic, the candidates worth measuring, and their memory."""

import dataclasses
from typing import Any

from ejkernel.arithmetic import cdiv
from ejkernel.families.token_sparse_attention import TokenSparseAttention
from ejkernel.ops.params import Direction
from ejkernel_pallas.tpu.mosaic.vectors import LANES, pad_to_lanes
from ejkernel_pallas.tpu.requirements import MAX_VMEM_BYTES

MAX_TILE_ROWS = 1024
"""The most rows of a tile of queries for a KV head: its query heads, for each query."""
MAX_PRODUCT_ROWS, MAX_FLOAT32_PRODUCT_ROWS = 256, 32
"""The most rows of a product, whose scores are computed at a time. A product of float32 is several of bfloat16, which
the compiler lays out one after another.
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TpuTokenSparse:
    """The configuration of the forward pass.

    Attributes:
        block_q: Queries per tile, a multiple of 8.
        block_kv: Keys per tile, a multiple of 128.
    """

    block_q: int
    block_kv: int

    def __post_init__(self) -> None:
        for name, multiple in (("block_q", 8), ("block_kv", LANES)):
            if (value := getattr(self, name)) < 1 or value % multiple:
                raise ValueError(f"{name}: got {value}, wants a positive multiple of {multiple}")


PUBLIC_FIELDS = {"block_q": "block_q", "block_k": "block_kv"}
"""Maps fields of the public configuration to fields of this one."""

SMALLEST_CONFIG = TpuTokenSparse(block_q=8, block_kv=LANES)
"""The configuration that takes the least memory, by which calls are refused."""


def heuristic(record: TokenSparseAttention, device: Any, direction: Direction) -> TpuTokenSparse:
    """Returns the configuration for a record. It is not measured."""
    if record.query.dtype.itemsize > 2:
        return fit_config(record, TpuTokenSparse(block_q=32, block_kv=256))
    is_narrow = pad_to_lanes(record.query.shape[3]) <= 2 * LANES
    return fit_config(record, TpuTokenSparse(block_q=32, block_kv=2048 if is_narrow else 1024))


def candidates(record: TokenSparseAttention, device: Any, direction: Direction) -> tuple[TpuTokenSparse, ...]:
    """Returns configurations worth measuring."""
    sizes = ((32, 2048), (32, 1024), (16, 2048), (16, 1024))
    found = (fit_config(record, TpuTokenSparse(block_q=q, block_kv=kv)) for q, kv in sizes)
    return tuple(dict.fromkeys(found))


def fit_config(record: TokenSparseAttention, config: TpuTokenSparse) -> TpuTokenSparse:
    """Returns a configuration with tiles no larger than the call and, if possible, than memory."""
    queries = max(8, MAX_TILE_ROWS // rows_per_query(record) // 8 * 8)
    block_q = min(config.block_q, queries, cdiv(record.query.shape[1], 8) * 8)
    block_kv = min(config.block_kv, cdiv(record.key.shape[1], LANES) * LANES)
    config = TpuTokenSparse(block_q=block_q, block_kv=block_kv)
    while vmem_bytes(record, config) > MAX_VMEM_BYTES and config != SMALLEST_CONFIG:
        if config.block_q > 8:
            config = dataclasses.replace(config, block_q=cdiv(config.block_q // 2, 8) * 8)
        else:
            config = dataclasses.replace(config, block_kv=cdiv(config.block_kv // 2, LANES) * LANES)
    return config


def rows_per_query(record: TokenSparseAttention) -> int:
    """Returns the rows of a query: the query heads of a KV head, padded to whole registers."""
    group = record.query.shape[2] // record.key.shape[2]
    return cdiv(group, 16) * 16


def vmem_bytes(record: TokenSparseAttention, config: TpuTokenSparse) -> int:
    """Returns the bytes of VMEM of two of each block, of scratch memory, and of what is computed for a KV head."""
    (_, keys, kv_heads, channels), itemsize = record.key.shape, record.query.dtype.itemsize
    width, value_width, lists = pad_to_lanes(channels), pad_to_lanes(record.value_size), record.indices.shape[2]
    rows, listed = config.block_q * rows_per_query(record), pad_to_lanes(record.indices.shape[3])
    blocks = kv_heads * (rows * (width + value_width) * itemsize + rows * LANES * 4)
    blocks += kv_heads * config.block_kv * ((width + (0 if record.value is None else value_width)) * itemsize + 4)
    blocks += lists * config.block_q * listed * 4
    scratch = kv_heads * rows * (value_width + 2 * LANES) * 4
    scratch += lists * config.block_q * cdiv(keys, config.block_kv) * config.block_kv * 4
    return 2 * blocks + scratch + 6 * rows * config.block_kv + 4 * LANES * listed
