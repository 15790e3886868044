"""The shared memory that a program of the paged-attention kernels takes.

Triton's compiler determines it; the results are upper bounds for its versions 3.6 and 3.9, which a test compares with
them. In the main loop shared memory holds the queries, the pipeline stages of keys and values (and of biases of pairs),
operands that are converted to another dtype, and the weights. After it, the accumulator passes through shared memory to
the threads that store it; in a `batch_invariant` block, it does so in the loop.
"""

import dataclasses

from ejkernel.ops.chips import KIBI, Gpu

MIN_TILE = 16
"""The smallest side of a tile that `tl.dot` supports."""

MIN_WGMMA_ROWS, MIN_WGMMA_WARPS = 64, 4
"""Rows and warps from which Triton uses WGMMA on Hopper. WGMMA reads shared memory, so that holds every stage."""

BARRIER_SMEM_BYTES = KIBI
"""Bytes for the copies' mbarriers, and for maxima and sums across warps."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TileShape:
    """The sizes that determine the shared memory of a program.

    Attributes:
        score_rows: Rows of scores.
        block_kv: Keys per tile.
        padded_head_dim: Padded columns of queries, and of keys.
        padded_columns_loaded_per_key: Padded columns that are loaded per key, including those of its value.
        padded_value_dim: Padded columns of the accumulator.
        cache_itemsize: Bytes per element of the cache.
        operand_itemsize: Bytes per element of the products' operands.
        converts_operands: Whether operands have another dtype than the cache.
        bias_itemsize: Bytes per element of the biases of pairs, which are copied like keys; 0 without them.
        num_warps: Warps per program.
        num_stages: Pipeline stages.
        partial_tile_stages: Those of the loop over partial tiles.
        stores_splits: Whether the main loop stores accumulators, which pass through shared memory next to the tiles.
    """

    score_rows: int
    block_kv: int
    padded_head_dim: int
    padded_columns_loaded_per_key: int
    padded_value_dim: int
    cache_itemsize: int
    operand_itemsize: int
    converts_operands: bool
    bias_itemsize: int
    num_warps: int
    num_stages: int
    partial_tile_stages: int
    stores_splits: bool


def nvidia_shared_memory_bytes(shape: TileShape, chip: Gpu) -> int:
    """Returns the most bytes of shared memory that a program takes on a chip of NVIDIA."""
    is_float32 = shape.operand_itemsize > 2
    operand_splits = 2 if is_float32 else 1  # float32 operands are split in two
    has_wgmma = chip.architecture in ("hopper", "blackwell")
    uses_wgmma = has_wgmma and shape.score_rows >= MIN_WGMMA_ROWS and shape.num_warps >= MIN_WGMMA_WARPS
    # On other chips the last stage goes to registers.
    register_stages, tile_elements = 0 if uses_wgmma else 1, shape.block_kv * shape.padded_columns_loaded_per_key
    num_buffers, num_partial_buffers = shape.num_stages - register_stages, shape.partial_tile_stages - register_stages
    weight_bytes = operand_splits * shape.score_rows * shape.block_kv * shape.operand_itemsize
    if num_buffers > 0:
        converts_operands = shape.converts_operands or (is_float32 and uses_wgmma)
        bias_bytes = num_partial_buffers * shape.score_rows * shape.block_kv * shape.bias_itemsize
        copied_bytes = max(
            num_buffers * shape.cache_itemsize * tile_elements,
            num_partial_buffers * shape.cache_itemsize * tile_elements + bias_bytes,
        )
        loop_bytes = copied_bytes + shape.operand_itemsize * converts_operands * tile_elements + weight_bytes
    else:
        # Tiles pass through shared memory from the threads that load them to those that multiply them.
        row_elements = shape.padded_head_dim + shape.padded_value_dim
        loop_bytes = max(weight_bytes, shape.block_kv * row_elements * shape.operand_itemsize)
    query_bytes = operand_splits * shape.score_rows * shape.padded_head_dim * shape.operand_itemsize
    accumulator_bytes = 4 * shape.score_rows * shape.padded_value_dim
    if shape.stores_splits:
        loop_bytes += accumulator_bytes
    return max(query_bytes + loop_bytes, accumulator_bytes) + BARRIER_SMEM_BYTES


def amd_shared_memory_bytes(shape: TileShape) -> int:
    """Returns the most bytes of shared memory that a program takes on CDNA, where registers hold the queries, and
    16-bit weights of 16 rows too.
    """
    # Both loops copy tiles of keys and values, and that over partial tiles those of biases too.
    tile_bytes, bias_bytes = (
        shape.block_kv * shape.padded_columns_loaded_per_key * shape.cache_itemsize,
        shape.score_rows * shape.block_kv * shape.bias_itemsize,
    )
    copied_bytes = max((shape.num_stages - 1) * tile_bytes, (shape.partial_tile_stages - 1) * (tile_bytes + bias_bytes))
    if shape.score_rows > MIN_TILE or shape.operand_itemsize > 2:
        copied_bytes += shape.score_rows * shape.block_kv * shape.operand_itemsize
    # The accumulator is rounded before it passes through shared memory.
    return max(copied_bytes, shape.operand_itemsize * shape.score_rows * shape.padded_value_dim)
