"""The configuration of the indexer's kernel: the heuristic, the candidates worth measuring, and their memory."""

import dataclasses
from typing import Any

from ejkernel.arithmetic import cdiv
from ejkernel.families.lightning_indexer import LightningIndexer, wide_query_dtype
from ejkernel.ops.params import Direction
from ejkernel_pallas.tpu.mosaic.vectors import LANES

BLOCK_Q = LANES
"""Queries per block: each has a lane of the vector registers."""
KEYS_PER_PRODUCT = 256
"""Keys of the products that are laid out one after another; tiles are multiples of this."""
MAX_HEADS_PER_STEP, MAX_FLOAT32_HEADS_PER_STEP = 64, 8
"""The most heads whose products are laid out one after another: results of one are summed under the next."""
MAX_BUFFER_ROWS = 2**15
"""The most keys of a selection, those that were selected before among them."""
PACKED_BITS = 31
"""Bits of a packed index, which is not negative: those of a key, and of the rows that it still has to move."""
MAX_VMEM_BYTES = 44 * 2**20
"""Bytes of VMEM for blocks and scratch memory: what every chip has, minus what the compiler needs."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TpuIndexerTiles:
    """The configuration of the forward pass.

    Attributes:
        block_k: Keys per grid step, a multiple of 256.
        keys_per_selection: The most keys that are scored before a selection, a multiple of `block_k`.
    """

    block_k: int
    keys_per_selection: int

    def __post_init__(self) -> None:
        for name, multiple in (("block_k", KEYS_PER_PRODUCT), ("keys_per_selection", self.block_k)):
            if (value := getattr(self, name)) < 1 or value % multiple:
                raise ValueError(f"{name}: got {value}, wants a positive multiple of {multiple}")


PUBLIC_FIELDS = {"block_k": "block_k"}
"""Maps fields of the public configuration to fields of this one."""

SMALLEST_CONFIG = TpuIndexerTiles(block_k=KEYS_PER_PRODUCT, keys_per_selection=KEYS_PER_PRODUCT)
"""The configuration that takes the least memory, by which calls are refused."""


def heuristic(record: LightningIndexer, device: Any, direction: Direction) -> TpuIndexerTiles:
    """Returns the configuration for a record. It is not measured."""
    return fit_config(record, TpuIndexerTiles(block_k=2048, keys_per_selection=16384))


def batch_invariant(record: LightningIndexer, device: Any, direction: Direction) -> TpuIndexerTiles:
    """Returns the configuration of a call in a `batch_invariant` block.

    No bit depends on the tiles: a score is a sum over heads and channels, and the selection is exact.
    """
    return heuristic(record, device, direction)


def candidates(record: LightningIndexer, device: Any, direction: Direction) -> tuple[TpuIndexerTiles, ...]:
    """Returns configurations worth measuring."""
    sizes = ((2048, 16384), (1024, 16384), (2048, 8192), (2048, 24576))
    found = (fit_config(record, TpuIndexerTiles(block_k=n, keys_per_selection=keys)) for n, keys in sizes)
    return tuple(dict.fromkeys(found))


def fit_config(record: LightningIndexer, config: TpuIndexerTiles) -> TpuIndexerTiles:
    """Returns a configuration with tiles no larger than the keys of a row and, if possible, than memory."""
    keys = cdiv(record.key.shape[1], KEYS_PER_PRODUCT) * KEYS_PER_PRODUCT
    block_k = min(config.block_k, keys)
    most = max_keys_per_selection(record) // block_k
    while not most and block_k > KEYS_PER_PRODUCT:
        block_k = cdiv(block_k // 2, KEYS_PER_PRODUCT) * KEYS_PER_PRODUCT
        most = max_keys_per_selection(record) // block_k
    count = max(1, min(config.keys_per_selection // block_k, most, cdiv(keys, block_k)))
    while count > 1 and vmem_bytes(record, block_k, count * block_k) > MAX_VMEM_BYTES:
        count -= 1
    # Selections of about the same size.
    count = cdiv(cdiv(keys, block_k), cdiv(cdiv(keys, block_k), count))
    return TpuIndexerTiles(block_k=block_k, keys_per_selection=count * block_k)


def kept_rows(top_k: int) -> int:
    """Returns the rows of the selected keys: K, padded to a power of two of at least 256."""
    return max(KEYS_PER_PRODUCT, 1 << (top_k - 1).bit_length())


def shift_bits(keys: int) -> int:
    """Returns the bits of a packed index that are left for the rows that it has to move."""
    return min(PACKED_BITS - (keys - 1).bit_length(), MAX_BUFFER_ROWS.bit_length() - 1)


def max_keys_per_selection(record: LightningIndexer) -> int:
    """Returns the most keys that a selection can choose from, in addition to those selected before."""
    return (1 << shift_bits(record.key.shape[1])) - kept_rows(record.top_k)


def vmem_bytes(record: LightningIndexer, block_k: int, keys_per_selection: int) -> int:
    """Returns the bytes of VMEM of two of each block, and of scratch memory."""
    (_, _, heads, channels), itemsize = record.query.shape, wide_query_dtype(record).itemsize
    width, rows = cdiv(channels, LANES) * LANES, kept_rows(record.top_k)
    blocks = (heads * BLOCK_Q + block_k) * width * itemsize + 4 * (cdiv(heads, 8) * 8 * BLOCK_Q + 8 * block_k)
    return 2 * (blocks + 2 * 4 * BLOCK_Q * rows) + 2 * 4 * BLOCK_Q * (rows + keys_per_selection + LANES)
