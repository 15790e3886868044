"""How much shared memory the kernels of selected attention take, and tiles that a chip holds.

Triton's compiler decides it; this follows what its version 3.9 takes of programs with many query heads per KV head.
"""

import dataclasses
from typing import Any

from ejkernel.families.selected_attention import SelectedAttention
from ejkernel_triton.chips import KIBI, Chip
from ejkernel_triton.sizes import padded

MIN_TILE = 16
"""Smallest side of a tile that `tl.dot` takes."""

WGMMA_ROWS, WGMMA_WARPS = 64, 4
"""Rows and warps from which on Hopper's products read shared memory, which then holds every stage."""


def fitted(record: SelectedAttention, config: Any, chip: Chip) -> Any:
    """The configuration, with fewer keys and stages until the chip holds it; the smallest where none fits."""
    backward = hasattr(config, "key_block_kv")
    while _of_queries(record, config, chip, backward) > chip.shared_memory:
        if config.block_kv > MIN_TILE:
            config = dataclasses.replace(config, block_kv=config.block_kv // 2)
        elif config.num_stages > 1:
            config = dataclasses.replace(config, num_stages=config.num_stages - 1)
        else:
            break
    while backward and _of_keys(record, config, chip) > chip.shared_memory:
        if config.key_block_kv > MIN_TILE:
            config = dataclasses.replace(config, key_block_kv=config.key_block_kv // 2)
        elif config.key_stages > 1:
            config = dataclasses.replace(config, key_stages=config.key_stages - 1)
        else:
            break
    return config


def shared_memory(record: SelectedAttention, config: Any, chip: Chip) -> int:
    """Bytes that the largest of a pass's programs takes."""
    backward = hasattr(config, "key_block_kv")
    of_queries = _of_queries(record, config, chip, backward)
    return max(of_queries, _of_keys(record, config, chip)) if backward else of_queries


def _rows(record: SelectedAttention) -> int:
    return padded(record.query.shape[2] // record.key.shape[2], MIN_TILE)


def _columns(record: SelectedAttention) -> tuple[int, int]:
    return padded(record.query.shape[3], MIN_TILE), padded(record.value.shape[3], MIN_TILE)


def _buffers(chip: Chip, rows: int, warps: int, stages: int) -> int:
    """Tiles of a pipeline in shared memory: but for Hopper's and Blackwell's products, the last goes to registers."""
    unit = chip.architecture in ("hopper", "blackwell")
    return stages if unit and rows >= WGMMA_ROWS and warps >= WGMMA_WARPS else stages - 1


def _of_queries(record: SelectedAttention, config: Any, chip: Chip, backward: bool) -> int:
    """Counts a query's program: its heads' rows, in the backward pass those of the cotangent, and tiles of keys."""
    rows, (keys, values), size = _rows(record), _columns(record), record.query.dtype.itemsize
    parts = 2 if size > 2 and chip.vendor == "nvidia" else 1  # float32 is multiplied in two parts
    copied = _buffers(chip, rows, config.num_warps, config.num_stages) * config.block_kv * (keys + values) * size
    weights = parts * rows * config.block_kv * size
    if chip.vendor == "amd":  # registers hold the rows, and the weights of 16 rows of 16 bits
        weights = 0 if rows == MIN_TILE and size <= 2 else weights
        return max(copied + weights, rows * max(keys, values) * size)
    query_bytes = parts * rows * (keys + (values if backward else 0)) * size
    return (
        max(query_bytes + copied + (0 if backward and size > 2 else weights), 4 * rows * max(keys, values)) + KIBI // 2
    )


def _of_keys(record: SelectedAttention, config: Any, chip: Chip) -> int:
    """Counts the program of one tile of keys: those, their values, and tiles of queries and cotangents."""
    (keys, values), size = _columns(record), record.query.dtype.itemsize
    rows = padded(config.block_q * (record.query.shape[2] // record.key.shape[2]), MIN_TILE)
    buffers = _buffers(chip, config.key_block_kv, config.key_warps, config.key_stages)
    copied = max(buffers, 1) * rows * (keys + values) * size
    if chip.vendor == "amd":
        return copied if buffers else rows * max(keys, values) * size
    return copied + (config.key_block_kv * (keys + values) + config.key_block_kv * rows) * size + KIBI
