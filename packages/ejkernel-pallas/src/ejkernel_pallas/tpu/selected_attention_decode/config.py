"""The configuration of the decode step's kernel: the heuristic, the candidates worth measuring, and their memory."""

import dataclasses
import math
from typing import Any

from ejkernel.arithmetic import cdiv
from ejkernel.families.selected_attention import SelectedAttention, blocks_per_query, num_keys
from ejkernel.ops.params import Direction
from ejkernel_pallas.tpu.mosaic.vectors import LANES, pad_to_lanes
from ejkernel_pallas.tpu.requirements import MAX_VMEM_BYTES

KEYS_PER_STEP = 1024
"""Keys of a list per grid step that the heuristic chooses: their scores stay in registers."""
MAX_KEYS_PER_STEP = 4096
"""The most keys of a list per grid step: their products are laid out one after another."""
MAX_COPIES_PER_STEP = 256
"""The most copies of keys per grid step, whose starts are laid out one after another."""
NUM_BUFFERS = 3
"""Buffers of keys and values: those of two later steps are copied while a step is computed."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TpuSelectedDecode:
    """The configuration of the forward pass.

    Attributes:
        block_kv: Keys of a list per grid step, rounded to whole blocks.
        lists: Lists of blocks per grid step, which belong to KV heads of one query.
    """

    block_kv: int
    lists: int

    def __post_init__(self) -> None:
        for name in ("block_kv", "lists"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: got {getattr(self, name)}, wants a positive number")


PUBLIC_FIELDS = {"block_k": "block_kv"}
"""Maps fields of the public configuration to fields of this one."""

SMALLEST_CONFIG = TpuSelectedDecode(block_kv=1, lists=1)
"""The configuration that takes the least memory, by which calls are refused."""


def heuristic(record: SelectedAttention, device: Any, direction: Direction) -> TpuSelectedDecode:
    """Returns the configuration for a record. It is not measured."""
    return fit_config(record, TpuSelectedDecode(block_kv=KEYS_PER_STEP, lists=2))


def candidates(record: SelectedAttention, device: Any, direction: Direction) -> tuple[TpuSelectedDecode, ...]:
    """Returns configurations worth measuring."""
    sizes = ((KEYS_PER_STEP, 2), (KEYS_PER_STEP, 4), (KEYS_PER_STEP, 1), (KEYS_PER_STEP // 2, 4))
    found = (fit_config(record, TpuSelectedDecode(block_kv=keys, lists=lists)) for keys, lists in sizes)
    return tuple(dict.fromkeys(found))


def fit_config(record: SelectedAttention, config: TpuSelectedDecode) -> TpuSelectedDecode:
    """Returns a configuration with whole blocks and lists, no larger than the call and, if possible, than memory."""
    keys, copied = keys_multiple(record), tokens_per_copy(record)
    longest = cdiv(max(1, blocks_per_query(record)) * record.block_size, keys) * keys
    lists = max(n for n in range(1, config.lists + 1) if record.key.shape[2] % n == 0)
    most = min(config.block_kv, longest, MAX_KEYS_PER_STEP, MAX_COPIES_PER_STEP * copied // lists)
    config = TpuSelectedDecode(block_kv=max(keys, most // keys * keys), lists=lists)
    while vmem_bytes(record, config) > MAX_VMEM_BYTES:
        if config.lists > 1:
            lists = max(n for n in range(1, config.lists) if record.key.shape[2] % n == 0)
            config = dataclasses.replace(config, lists=lists)
        elif config.block_kv > keys:
            config = dataclasses.replace(config, block_kv=cdiv(config.block_kv // 2, keys) * keys)
        else:
            break
    return config


def tokens_per_copy(record: SelectedAttention) -> int:
    """Returns the most tokens of which a block has whole ones, and a page or a row of keys too."""
    return math.gcd(record.block_size, record.key.shape[1])


def keys_multiple(record: SelectedAttention) -> int:
    """Returns the fewest keys that are whole blocks and whole lane groups."""
    return math.lcm(record.block_size, LANES)


def elements_per_word(record: SelectedAttention) -> int:
    """Returns the elements of keys and values in 32 bits; 1 for float64, which other limits refuse."""
    return max(1, 4 // record.key.dtype.itemsize)


def padded_rows(record: SelectedAttention) -> int:
    """Returns the query heads of a KV head, padded to whole registers."""
    multiple = 32 // record.query.dtype.itemsize
    return cdiv(record.query.shape[2] // record.key.shape[2], multiple) * multiple


def smem_words(record: SelectedAttention) -> int:
    """Returns the words of scalar memory that the larger of the branches' tables take."""
    (batch, tokens, *_), kv_heads = record.query.shape, record.key.shape[2]
    unit, keys = keys_multiple(record) // record.block_size, num_keys(record)
    lists = kv_heads * cdiv(max(1, blocks_per_query(record)), unit) * unit
    if record.window_size is not None:
        lists = max(lists, cdiv(cdiv(min(record.window_size, keys), record.block_size) + 1, unit) * unit)
    pages = 0 if record.block_tables is None else (batch + NUM_BUFFERS) * record.block_tables.shape[1]
    steps = NUM_BUFFERS * MAX_KEYS_PER_STEP // record.block_size
    return batch * tokens * (lists + 2) + steps * kv_heads + pages


def vmem_bytes(record: SelectedAttention, config: TpuSelectedDecode) -> int:
    """Returns the bytes of VMEM of the buffers of keys and values, two of each block, and scratch memory."""
    kv_heads, itemsize = record.key.shape[2], record.key.dtype.itemsize
    lanes = sum(pad_to_lanes(x.shape[3]) for x in (record.key, record.value))
    heads_per_word = elements_per_word(record) if kv_heads > 1 else 1
    copied_heads = max(config.lists * heads_per_word, kv_heads if record.window_size is not None else 1)
    buffers = NUM_BUFFERS * copied_heads * config.block_kv * lanes * itemsize
    heads = kv_heads if record.window_size is not None else config.lists
    rows = heads * padded_rows(record)
    return buffers + rows * (4 * lanes * itemsize + 4 * lanes + 6 * LANES * 4)
