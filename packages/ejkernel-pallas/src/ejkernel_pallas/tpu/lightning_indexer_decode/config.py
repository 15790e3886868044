"""The configuration of the decode step's kernel: the heuristic, the candidates worth measuring, and their memory."""

import dataclasses
import math
from typing import Any

from ejkernel.arithmetic import cdiv
from ejkernel.families.lightning_indexer import LightningIndexer, num_keys, wide_query_dtype
from ejkernel.ops.params import Direction
from ejkernel_pallas.tpu.mosaic.vectors import LANES, SUBLANES
from ejkernel_pallas.tpu.requirements import MAX_VMEM_BYTES

KEYS_PER_STEP = LANES * SUBLANES
"""Keys whose scores fill a register of one query; tiles are multiples of this."""
MAX_PAGE_SLOTS = 2**13
"""The most slots of a page: a tile has whole pages."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TpuIndexerDecodeTiles:
    """The configuration of the forward pass.

    Attributes:
        block_k: Keys per grid step, a multiple of 1024.
    """

    block_k: int

    def __post_init__(self) -> None:
        if self.block_k < 1 or self.block_k % KEYS_PER_STEP:
            raise ValueError(f"block_k: got {self.block_k}, wants a positive multiple of {KEYS_PER_STEP}")


PUBLIC_FIELDS = {"block_k": "block_k"}
"""Maps fields of the public configuration to fields of this one."""


def heuristic(record: LightningIndexer, device: Any, direction: Direction) -> TpuIndexerDecodeTiles:
    """Returns the configuration for a record. It is not measured."""
    return fit_config(record, TpuIndexerDecodeTiles(block_k=8192))


def candidates(record: LightningIndexer, device: Any, direction: Direction) -> tuple[TpuIndexerDecodeTiles, ...]:
    """Returns configurations worth measuring."""
    found = (fit_config(record, TpuIndexerDecodeTiles(block_k=n)) for n in (8192, 4096, 2048, 16384))
    return tuple(dict.fromkeys(found))


def smallest_config(record: LightningIndexer) -> TpuIndexerDecodeTiles:
    """Returns the configuration that takes the least memory, by which calls are refused."""
    return fit_config(record, TpuIndexerDecodeTiles(block_k=KEYS_PER_STEP))


def fit_config(record: LightningIndexer, config: TpuIndexerDecodeTiles) -> TpuIndexerDecodeTiles:
    """Returns a configuration with whole pages, no larger than the keys of a row and, if possible, than memory."""
    unit = KEYS_PER_STEP
    if record.block_tables is not None:
        unit = math.lcm(unit, max(1, record.key.shape[1]))
    most = cdiv(max(1, num_keys(record)), unit)
    units = max(1, min(config.block_k // unit, most))
    while units > 1 and vmem_bytes(record, units * unit) > MAX_VMEM_BYTES:
        units = cdiv(units, 2)
    return TpuIndexerDecodeTiles(block_k=units * unit)


def padded_heads(record: LightningIndexer) -> int:
    """Returns the heads of a query, padded to whole registers."""
    return cdiv(record.query.shape[2], SUBLANES) * SUBLANES


def list_rows(top_k: int) -> int:
    """Returns the rows of 128 keys that a list of K keys is stored in, a multiple of 8."""
    return cdiv(top_k, KEYS_PER_STEP) * SUBLANES


def num_key_tiles(record: LightningIndexer, block_k: int) -> int:
    """Returns the tiles of keys of a batch row."""
    return max(1, cdiv(num_keys(record), block_k))


def vmem_bytes(record: LightningIndexer, block_k: int) -> int:
    """Returns the bytes of VMEM of two of each block, and of scratch memory."""
    (_, tokens, _, channels), itemsize = record.query.shape, wide_query_dtype(record).itemsize
    width, query_rows = cdiv(channels, LANES) * LANES, tokens * padded_heads(record)
    lists, keys = list_rows(record.top_k) * LANES, num_key_tiles(record, block_k) * block_k
    inputs = query_rows * (width * itemsize + 4 * LANES) + block_k * (width * record.key.dtype.itemsize + 4 * SUBLANES)
    outputs = 2 * 4 * tokens * lists
    return 2 * (inputs + outputs) + 4 * keys * (tokens + 1) + 4 * lists * (LANES + 4 * SUBLANES)


def smem_words(record: LightningIndexer, block_k: int) -> int:
    """Returns the words of scalar memory that tables take."""
    (batch, tokens, *_), tiles = record.query.shape, num_key_tiles(record, block_k)
    pages = 0 if record.block_tables is None else tiles * (block_k // max(1, record.key.shape[1]) + 1)
    return batch * (2 * tiles + 2 + 2 * tokens + pages)
