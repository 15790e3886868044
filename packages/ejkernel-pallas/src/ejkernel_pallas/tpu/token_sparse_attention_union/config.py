"""Tile sizes of attention to the union of lists: the heuristic, the candidates worth measuring, and their memory."""

import dataclasses
import math
from typing import Any

from ejkernel.arithmetic import cdiv
from ejkernel.families.token_sparse_attention import TokenSparseAttention
from ejkernel.ops.params import Direction
from ejkernel_pallas.tpu.mosaic.vectors import LANES, pad_to_lanes
from ejkernel_pallas.tpu.requirements import MAX_VMEM_BYTES

GROUP = 256
"""Keys that one product with a one-hot matrix moves to the front."""
PIECE = 64
"""Rows of such a product that are computed at a time."""
MAX_GROUPS_PER_APPEND = 8
"""The most groups of keys that are moved at a time."""
MAX_PRODUCT_ROWS, MAX_FLOAT32_PRODUCT_ROWS = 512, 32
"""The most rows of queries of a product. A product of float32 is several of bfloat16, which the compiler lays out one
after another.
"""
MAX_BLOCK_Q = 16
"""The most queries per tile: a key has two terms for each of them."""
MAX_COUNT_ROWS = 256
"""The most groups of 128 keys that one product counts the entries of."""
LIST_PIECE = 2048
"""Entries of a list that one product counts."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TpuTokenSparseUnion:
    """The configuration of the forward pass.

    Attributes:
        block_q: Queries per tile, which share the union of their lists: a multiple of 8, of which at most 16 are used.
        block_kv: Keys per grid step, a multiple of 128 that is rounded to whole groups.
        union_keys: Keys of the union that are attended at a time, a multiple of 256.
    """

    block_q: int
    block_kv: int
    union_keys: int

    def __post_init__(self) -> None:
        for name, multiple in (("block_q", 8), ("block_kv", LANES), ("union_keys", GROUP)):
            if (value := getattr(self, name)) < 1 or value % multiple:
                raise ValueError(f"{name}: got {value}, wants a positive multiple of {multiple}")


PUBLIC_FIELDS = {"block_q": "block_q", "block_k": "block_kv"}
"""Maps fields of the public configuration to fields of this one."""

SMALLEST_CONFIG = TpuTokenSparseUnion(block_q=8, block_kv=GROUP, union_keys=GROUP)
"""The configuration that takes the least memory, by which calls are refused."""


def heuristic(record: TokenSparseAttention, device: Any, direction: Direction) -> TpuTokenSparseUnion:
    """Returns the configuration for a record. It is not measured."""
    union_keys = GROUP if record.query.dtype.itemsize > 2 else 1024
    return fit_config(record, TpuTokenSparseUnion(block_q=8, block_kv=2048, union_keys=union_keys))


def candidates(record: TokenSparseAttention, device: Any, direction: Direction) -> tuple[TpuTokenSparseUnion, ...]:
    """Returns configurations worth measuring."""
    sizes = ((8, 2048, 1024), (8, 2048, 2048), (8, 2048, 512), (16, 2048, 1024))
    found = (fit_config(record, TpuTokenSparseUnion(block_q=q, block_kv=kv, union_keys=n)) for q, kv, n in sizes)
    return tuple(dict.fromkeys(found))


def fit_config(record: TokenSparseAttention, config: TpuTokenSparseUnion) -> TpuTokenSparseUnion:
    """Returns a configuration with tiles no larger than the call and, if possible, than memory."""
    keys = max(GROUP, cdiv(record.key.shape[1], GROUP) * GROUP)
    config = TpuTokenSparseUnion(
        block_q=8 if record.query.shape[1] <= 8 else min(config.block_q, MAX_BLOCK_Q),
        block_kv=min(cdiv(config.block_kv, GROUP) * GROUP, keys),
        union_keys=min(config.union_keys, keys),
    )
    smallest = dataclasses.asdict(SMALLEST_CONFIG)
    for name in ("block_q", "union_keys", "block_kv"):
        while vmem_bytes(record, config) > MAX_VMEM_BYTES and (value := getattr(config, name)) > smallest[name]:
            half = cdiv(value // 2, smallest[name]) * smallest[name]
            config = dataclasses.replace(config, **{name: half})
    return config


def rows_per_query(record: TokenSparseAttention) -> int:
    """Returns the rows of a query: its heads, padded to whole registers."""
    return cdiv(record.query.shape[2], 16) * 16


def groups_per_append(config: TpuTokenSparseUnion) -> int:
    """Returns how many groups of keys are moved at a time."""
    return math.gcd(config.block_kv // GROUP, MAX_GROUPS_PER_APPEND)


def num_key_tiles(record: TokenSparseAttention, config: TpuTokenSparseUnion) -> int:
    """Returns the grid steps over the keys of a batch row."""
    return cdiv(record.key.shape[1], config.block_kv)


def count_rows(record: TokenSparseAttention, config: TpuTokenSparseUnion) -> tuple[int, int]:
    """Returns the groups of 128 keys that one product counts, and those of all products."""
    groups = num_key_tiles(record, config) * config.block_kv // LANES
    rows = min(MAX_COUNT_ROWS, cdiv(groups, 16) * 16)
    return rows, cdiv(groups, rows) * rows


def padded_list(listed: int) -> int:
    """Returns the length of a list that is counted in whole products."""
    return cdiv(listed, LIST_PIECE) * LIST_PIECE if listed > LIST_PIECE else pad_to_lanes(listed)


def key_width(record: TokenSparseAttention, config: TpuTokenSparseUnion) -> int:
    """Returns the lanes of a key: its channels, and two terms for each query of a tile in the last ones."""
    return pad_to_lanes(record.query.shape[3] + 2 * config.block_q)


def vmem_bytes(record: TokenSparseAttention, config: TpuTokenSparseUnion) -> int:
    """Returns the bytes of VMEM of two of each block, of scratch memory, and of what is computed at a time."""
    itemsize, keys = record.query.dtype.itemsize, config.union_keys
    width, value_width = key_width(record, config), pad_to_lanes(record.value_size)
    rows, listed = config.block_q * rows_per_query(record), padded_list(record.indices.shape[3])
    blocks = rows * (width + value_width) * itemsize + rows * LANES * 4
    blocks += config.block_kv * (width * itemsize + 4) + config.block_q * listed * 4
    scratch = rows * (value_width + 2 * LANES) * 4
    scratch += (keys + (1 + groups_per_append(config)) * GROUP) * width * itemsize + config.block_kv * LANES * itemsize
    scratch += count_rows(record, config)[1] * LANES * config.block_q * 4 + GROUP * GROUP * 4
    product_rows = MAX_FLOAT32_PRODUCT_ROWS if itemsize > 2 else MAX_PRODUCT_ROWS
    return 2 * blocks + scratch + 12 * product_rows * keys + 8 * MAX_COUNT_ROWS * min(listed, LIST_PIECE)
