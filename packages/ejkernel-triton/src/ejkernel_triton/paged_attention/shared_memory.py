"""How much shared memory a tile of the paged kernel takes, and the largest tile that a chip holds.

Triton's compiler decides it; this is an upper bound of what its versions 3.6 and 3.9 take, which a test holds against
them. While keys are read there are the queries, the tiles of keys and values that copies fill, what products need in
another dtype, and the weights. Later the accumulator passes through on its way to the threads that store it.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp

from ejkernel.families.paged_attention import PagedAttention
from ejkernel.families.paged_attention import pages as paged_cache
from ejkernel_triton.chips import KIBI, Chip
from ejkernel_triton.paged_attention.groups import group_of
from ejkernel_triton.sizes import padded

MIN_TILE = 16
"""Smallest side of a tile that `tl.dot` takes."""

WGMMA_ROWS, WGMMA_WARPS = 64, 4
"""Rows and warps from which on Hopper's products read shared memory, which then holds every stage."""

BARRIERS = KIBI
"""Bytes for the barriers of copies, and for maxima and sums that cross warps."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TileShape:
    """What the shared memory of a program follows from.

    Attributes:
        rows: Rows of scores.
        keys: Keys of a tile.
        query_columns: Padded columns of queries, and of keys.
        read_columns: Padded columns that are read of a key, those of its value included.
        value_columns: Padded columns of the accumulator.
        stored: Bytes of an element of the cache.
        operand: Bytes of an element of the products' operands.
        converted: Whether operands are other numbers than those of the cache.
        warps: Warps of a program.
        stages: Pipeline stages.
    """

    rows: int
    keys: int
    query_columns: int
    read_columns: int
    value_columns: int
    stored: int
    operand: int
    converted: bool
    warps: int
    stages: int


def shared_memory(record: PagedAttention, config: Any, chip: Chip) -> int:
    """The most bytes of shared memory that a program of the kernel takes.

    Args:
        record: The canonical arguments.
        config: Its `PagedForward`.
        chip: What it runs on.
    """
    shape = _shape(record, config, chip)
    return _on_amd(shape) if chip.vendor == "amd" else _on_nvidia(shape, chip)


def fits(record: PagedAttention, config: Any, chip: Chip) -> bool:
    """Whether a chip holds a program of the kernel."""
    return shared_memory(record, config, chip) <= chip.shared_memory


def fitted(record: PagedAttention, config: Any, chip: Chip) -> Any:
    """The configuration, with fewer stages, rows and keys until the chip holds it; the smallest where none fits."""
    while not fits(record, config, chip):
        rows = padded(config.block_q * group_of(record, chip), MIN_TILE)
        if config.num_stages > 2:
            config = dataclasses.replace(config, num_stages=config.num_stages - 1)
        elif config.block_q > 1 and rows > 2 * MIN_TILE:
            config = dataclasses.replace(config, block_q=config.block_q // 2)
        elif config.block_kv > MIN_TILE:
            config = dataclasses.replace(config, block_kv=config.block_kv // 2)
        elif config.block_q > 1:
            config = dataclasses.replace(config, block_q=config.block_q // 2)
        elif config.num_stages > 1:
            config = dataclasses.replace(config, num_stages=1)
        else:
            return config
    return config


def _shape(record: PagedAttention, config: Any, chip: Chip) -> TileShape:
    size, values = record.query.shape[-1], padded(paged_cache.value_size(record), MIN_TILE)
    latent = 0 if record.latent is None else record.latent[0]
    columns = padded(latent, MIN_TILE) + padded(size - latent, MIN_TILE) if latent else padded(size, MIN_TILE)
    query, stored = record.query.dtype.itemsize, record.key_pages.dtype.itemsize
    operand = query if stored == 1 else max(query, stored)
    rounded = 0 if record.compute_dtype is None else jnp.dtype(record.compute_dtype).itemsize
    return TileShape(
        rows=padded(config.block_q * group_of(record, chip), MIN_TILE),
        keys=config.block_kv,
        query_columns=columns,
        # A latent vector is key and value.
        read_columns=columns if latent else columns + values,
        value_columns=padded(latent, MIN_TILE) if latent else values,
        stored=stored,
        operand=max(operand, rounded),
        converted=stored < operand or rounded > 0,
        warps=config.num_warps,
        stages=config.num_stages,
    )


def _on_nvidia(shape: TileShape, chip: Chip) -> int:
    wide, parts = shape.operand > 2, 2 if shape.operand > 2 else 1  # float32 is multiplied in two parts
    unit = chip.architecture in ("hopper", "blackwell")
    wgmma = unit and shape.rows >= WGMMA_ROWS and shape.warps >= WGMMA_WARPS
    # Elsewhere the last stage goes to registers.
    buffers, tile = shape.stages if wgmma else shape.stages - 1, shape.keys * shape.read_columns
    weights = parts * shape.rows * shape.keys * shape.operand
    if buffers > 0:
        converted = shape.converted or (wide and wgmma)
        loop = (buffers * shape.stored + shape.operand * converted) * tile + weights
    else:
        # Tiles pass through on their way from the threads that load them to those that multiply them.
        loop = max(weights, shape.keys * (shape.query_columns + shape.value_columns) * shape.operand)
    queries = parts * shape.rows * shape.query_columns * shape.operand
    return max(queries + loop, 4 * shape.rows * shape.value_columns) + BARRIERS


def _on_amd(shape: TileShape) -> int:
    """The same on CDNA, where registers hold the queries, and the weights of 16 rows of 16 bits too."""
    copied = (shape.stages - 1) * shape.keys * shape.read_columns * shape.stored
    if shape.rows > MIN_TILE or shape.operand > 2:
        copied += shape.rows * shape.keys * shape.operand
    # Rounded before it passes through.
    return max(copied, shape.operand * shape.rows * shape.value_columns)
