"""Tile sizes of the selected branch: the heuristic, the candidates worth measuring, and the memory that tiles take."""

import dataclasses
from typing import Any

from ejkernel.arithmetic import cdiv
from ejkernel.families.selected_attention import SelectedAttention, blocks_per_query, num_listable_blocks
from ejkernel.ops.params import Direction
from ejkernel_pallas.tpu.mosaic.vectors import LANES, pad_to_lanes

TILE_ROWS_MULTIPLE = 1024
"""The rows of a tile of queries are a multiple of this, so that the lse of a tile fills whole registers."""
MAX_TILE_ROWS = 2**14
MAX_BLOCK_Q = 2**10
"""The largest number of queries of a tile, which an entry of the work list has bits for."""
MAX_KEYS_PER_PRODUCT = 128
"""The largest number of keys of a product; longer blocks are split."""
FORWARD_PRODUCT_ROWS, BACKWARD_PRODUCT_ROWS = 1024, 256
"""Rows of a product of bfloat16. More hide how long the first result takes, but leave more of a last product empty."""
MAX_READERS = 64
"""The largest number of queries of a product that the heuristic chooses, whose loads are laid out one after another."""
NUM_PIPELINE_STAGES = 3
"""The number of stages of the pipeline of products."""
MAX_WORK_LIST_SMEM_BYTES = 400 * 2**10
"""The largest work list of a tile of queries, in bytes of SMEM, which holds two of them."""
MAX_VMEM_BYTES = 44 * 2**20
"""Bytes of VMEM for blocks and scratch memory: what every chip has, minus what the compiler needs."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TpuSelected:
    """The configuration of either pass.

    Attributes:
        block_q: Queries per tile, whose softmax state is in VMEM.
        block_kv: Keys per tile in VMEM, rounded to whole blocks.
        readers: The number of queries that read a block in one product.
    """

    block_q: int
    block_kv: int
    readers: int

    def __post_init__(self) -> None:
        for name in ("block_q", "block_kv", "readers"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: got {getattr(self, name)}, wants a positive number")
        if self.block_q > MAX_BLOCK_Q:
            raise ValueError(f"block_q: got {self.block_q}, wants at most {MAX_BLOCK_Q} queries")


PUBLIC_FIELDS = {"block_q": "block_q", "block_k": "block_kv"}
"""Maps fields of the public configuration to fields of this one."""

SMALLEST_CONFIG = TpuSelected(block_q=1, block_kv=1, readers=1)
"""The configuration that takes the least memory, by which calls are refused."""


def heuristic(record: SelectedAttention, device: Any, direction: Direction) -> TpuSelected:
    """Returns the configuration for a record: the largest tiles that fit."""
    rows = rows_per_token(record)
    is_forward = direction == "forward"
    product_rows = FORWARD_PRODUCT_ROWS if is_forward else BACKWARD_PRODUCT_ROWS
    if record.query.dtype.itemsize > 2:
        product_rows = 128
    block_q = min(MAX_BLOCK_Q, MAX_TILE_ROWS // rows)
    readers = min(MAX_READERS, max(1, product_rows // rows))
    block_kv = 2048 if is_forward else 4096
    config = TpuSelected(block_q=block_q, block_kv=block_kv, readers=readers)
    # Where few queries of a tile read the same block, most places for readers would be empty.
    while work_list_bytes(record, config) > MAX_WORK_LIST_SMEM_BYTES and config.readers * rows > BACKWARD_PRODUCT_ROWS:
        config = dataclasses.replace(config, readers=config.readers // 2)
    return fit_config(record, config, direction)


def candidates(record: SelectedAttention, device: Any, direction: Direction) -> tuple[TpuSelected, ...]:
    """Returns configurations worth measuring."""
    default = heuristic(record, device, direction)
    others = (
        dataclasses.replace(default, block_q=max(1, default.block_q // divisor), readers=readers)
        for divisor in (1, 2)
        for readers in (default.readers, max(1, default.readers // 2), 2 * default.readers)
    )
    return tuple(dict.fromkeys((default, *(fit_config(record, one, direction) for one in others))))


def fit_config(record: SelectedAttention, config: TpuSelected, direction: Direction) -> TpuSelected:
    """Returns a configuration with whole tiles, no larger than the call and, if possible, than memory."""
    multiple = max(8, TILE_ROWS_MULTIPLE // rows_per_token(record))
    tokens = cdiv(record.query.shape[1], multiple) * multiple
    block_q = min(tokens, MAX_BLOCK_Q, cdiv(config.block_q, multiple) * multiple)
    block_kv = min(config.block_kv, cdiv(record.key.shape[1], LANES) * LANES)
    config = dataclasses.replace(config, block_q=block_q, block_kv=block_kv)
    while (
        vmem_bytes(record, config, direction) > MAX_VMEM_BYTES
        or work_list_bytes(record, config) > MAX_WORK_LIST_SMEM_BYTES
    ):
        smaller = cdiv(config.block_q // 2, multiple) * multiple
        if smaller < config.block_q:
            config = dataclasses.replace(config, block_q=smaller)
        elif config.block_kv > LANES:
            config = dataclasses.replace(config, block_kv=config.block_kv // 2)
        else:
            break
    return config


def rows_per_token(record: SelectedAttention) -> int:
    """Returns the rows of a token: the query heads of a KV head, padded to a power of two of at least 8."""
    group = record.query.shape[2] // record.key.shape[2]
    return max(8, 1 << (group - 1).bit_length())


def blocks_per_part(record: SelectedAttention) -> int:
    """Returns how many blocks one product has: two neighbours, where they are no more keys than one may have."""
    both_fit = record.block_starts is None and 2 * record.block_size <= MAX_KEYS_PER_PRODUCT
    return 2 if both_fit and record.block_size % 8 == 0 else 1


def parts_per_block_and_keys_per_part(record: SelectedAttention) -> tuple[int, int]:
    """Returns the parts that a block is split into, and the keys of a part."""
    splits = cdiv(record.block_size, MAX_KEYS_PER_PRODUCT)
    return splits, cdiv(record.block_size, splits) * blocks_per_part(record)


def num_parts(record: SelectedAttention) -> int:
    """Returns the number of parts of all blocks."""
    splits, _ = parts_per_block_and_keys_per_part(record)
    return cdiv(splits * num_listable_blocks(record), blocks_per_part(record))


def key_tile_sizes(record: SelectedAttention, config: TpuSelected) -> tuple[int, int, int]:
    """Returns the keys of a padded part of a block, the parts of a tile, and the number of tiles."""
    _, size = parts_per_block_and_keys_per_part(record)
    keys, parts = cdiv(size, 16) * 16, num_parts(record)
    per_tile = max(1, min(parts, config.block_kv // keys))
    return keys, per_tile, cdiv(parts, per_tile)


def max_items_per_query_tile(record: SelectedAttention, config: TpuSelected) -> int:
    """Returns the largest number of products of a tile of queries."""
    splits, _ = parts_per_block_and_keys_per_part(record)
    entries = config.block_q * blocks_per_query(record) * splits
    # A block's last product may have fewer readers. Before and after the products of each tile of keys, the pipeline
    # runs stages of empty ones.
    _, _, tiles = key_tile_sizes(record, config)
    empty = (NUM_PIPELINE_STAGES - 1) * (tiles + 1)
    return min(entries, num_parts(record) + entries // config.readers) + empty


def header_words(tiles: int) -> int:
    """Returns the words of a work list before its items: where the items of each tile of keys begin, and an end."""
    return tiles + 1


def work_list_words(record: SelectedAttention, config: TpuSelected) -> int:
    """Returns the 32-bit words of the work list of a tile of queries."""
    _, _, tiles = key_tile_sizes(record, config)
    words = header_words(tiles) + max_items_per_query_tile(record, config) * (config.readers + 1)
    return cdiv(words, LANES) * LANES


def work_list_bytes(record: SelectedAttention, config: TpuSelected) -> int:
    """Returns the bytes of SMEM of the work list of a tile of queries."""
    return 4 * work_list_words(record, config)


def vmem_bytes(record: SelectedAttention, config: TpuSelected, direction: Direction) -> int:
    """Returns the bytes of VMEM of blocks and scratch memory of the largest kernel of a pass."""
    rows, itemsize = rows_per_token(record), record.query.dtype.itemsize
    row_bytes = 4 if rows < 16 else itemsize
    width, value_width = (pad_to_lanes(x) for x in (record.query.shape[3], record.value.shape[3]))
    keys, per_tile, _ = key_tile_sizes(record, config)
    tile_rows = config.block_q * rows
    stages = config.readers * rows * 4 * (2 * max(keys, LANES) + LANES)
    states = stages + (tile_rows + rows) * 4 * (2 * LANES + max(width, value_width))
    # A row has one lse, and one delta. Gradients are float32.
    operand_bytes, key_bytes = row_bytes * (width + value_width) + 4, itemsize
    if direction != "forward":
        operand_bytes, key_bytes = operand_bytes + 4 * width + 4, itemsize + 4
    return states + 2 * tile_rows * operand_bytes + 2 * per_tile * keys * key_bytes * (width + value_width)
