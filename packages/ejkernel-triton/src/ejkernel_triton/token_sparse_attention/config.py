"""Tile sizes and launch parameters of the token-sparse attention kernels, and the tiles that shared memory holds."""

import dataclasses
import functools
from typing import Any

from ejkernel.families.token_sparse_attention import FAMILY, TokenSparseAttention
from ejkernel.ops.chips import KIBI, Gpu, gpu_of
from ejkernel.ops.device import DeviceInfo
from ejkernel.ops.params import Direction
from ejkernel.planning.fixed_sizes import with_fixed_sizes
from ejkernel_triton.launch import is_interpreting
from ejkernel_triton.shrink import shrink_until_it_fits
from ejkernel_triton.sizes import pad_to_dot_size, pad_to_power_of_two, require_powers_of_two
from ejkernel_triton.token_sparse_attention.spec import key_tile_columns, value_is_first_tile

MIN_TILE = 16
"""The smallest side of a tile that `tl.dot` supports."""
MAX_HEADS_PER_PROGRAM = 64
"""The most query heads per program: the rows of WGMMA's smallest tile. More rows of 512 columns fit no registers."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SparseForward:
    """Configuration of the forward kernel.

    Attributes:
        heads: Query heads per program.
        block_kv: Listed keys per tile.
        num_warps: Warps per program.
        num_stages: Pipeline stages of the copies of keys and values.
    """

    heads: int
    block_kv: int
    num_warps: int
    num_stages: int

    def __post_init__(self) -> None:
        """Raises ValueError for sizes that tiles cannot have."""
        require_powers_of_two(self, "heads", "block_kv", "num_warps")


@dataclasses.dataclass(frozen=True, kw_only=True)
class SparseBackward:
    """Configuration of the two backward kernels, `sparse_bwd_dq_kernel` and `sparse_bwd_dkdv_kernel`.

    Attributes:
        heads: Query heads per program of `sparse_bwd_dq_kernel`.
        block_kv: Listed keys per tile of `sparse_bwd_dq_kernel`.
        num_warps: Warps per program of `sparse_bwd_dq_kernel`.
        num_stages: Pipeline stages of `sparse_bwd_dq_kernel`.
        key_heads: Query heads per tile in the loop of `sparse_bwd_dkdv_kernel`.
        key_block_kv: Listed keys per program of `sparse_bwd_dkdv_kernel`.
        key_warps: Warps per program of `sparse_bwd_dkdv_kernel`.
        key_stages: Pipeline stages of `sparse_bwd_dkdv_kernel`.
    """

    heads: int
    block_kv: int
    num_warps: int
    num_stages: int
    key_heads: int
    key_block_kv: int
    key_warps: int
    key_stages: int

    def __post_init__(self) -> None:
        """Raises ValueError for sizes that tiles cannot have."""
        require_powers_of_two(self, "heads", "block_kv", "num_warps", "key_heads", "key_block_kv", "key_warps")


PUBLIC_FIELDS = {"block_k": "block_kv", "num_warps": "num_warps", "num_stages": "num_stages"}
"""Maps fields of the public configuration to fields of these; in the backward pass to those of
`sparse_bwd_dq_kernel`.
"""


def heuristic(record: TokenSparseAttention, device: DeviceInfo, direction: Direction) -> SparseForward | SparseBackward:
    """Returns the default tile sizes for a record on a device, not measured."""
    return candidates(record, device, direction)[0]


def batch_invariant(
    record: TokenSparseAttention, device: DeviceInfo, direction: Direction
) -> SparseForward | SparseBackward:
    """Returns the tile sizes for all calls in a `batch_invariant` block."""
    return heuristic(with_fixed_sizes(record, FAMILY.axes_of(record), {"b": 1, "t": 1}), device, direction)


def candidates(
    record: TokenSparseAttention, device: DeviceInfo, direction: Direction
) -> tuple[SparseForward | SparseBackward, ...]:
    """Returns tile sizes worth measuring for a record on a device, the most likely first."""
    configs = _forward_configs(record) if direction == "forward" else _backward_configs(record)
    return tuple(dict.fromkeys(shrink_to_shared_memory(record, x, gpu_of(device)) for x in configs))


def shared_memory_refusal(record: TokenSparseAttention, device: DeviceInfo) -> str:
    """Returns why the kernels cannot run for a record on a device; empty where they can."""
    chip = gpu_of(device)
    directions: tuple[Direction, ...] = ("forward", "backward")
    needed_bytes = max(shared_memory_bytes(record, heuristic(record, device, x)) for x in directions)
    if needed_bytes <= chip.shared_memory:
        return ""
    sizes = f"keys of {record.query.shape[3]} and values of {record.value_size} entries"
    return f"{sizes} take up to {needed_bytes} bytes of shared memory, and {chip.target} has {chip.shared_memory}"


def _forward_configs(record: TokenSparseAttention) -> list[SparseForward]:
    heads = padded_heads_per_program(record)
    if is_interpreting():
        return [SparseForward(heads=min(heads, MIN_TILE), block_kv=MIN_TILE, num_warps=4, num_stages=2)]
    # An H200 computes 4096 queries of 2048 keys, 64 heads with 4 KV heads of 128, in 2.21 ms with a warp and 32 keys,
    # in 2.46 with four and 64; 128 heads of a latent KV head in 8.6 ms with eight and 64, in 12.8 with eight and 32
    # (docs/lab/token_sparse_attention_gpu.md).
    # One warp holds the accumulator and the queries of 128 columns; wider rows take four.
    few_heads = ((64, 4, 2), (128, 4, 2), (64, 2, 2), (32, 2, 2))
    if max(_padded_row_columns(record), record.value_size) <= 128:
        few_heads = ((32, 1, 3), *few_heads)
    many_heads = ((64, 8, 2), (32, 8, 3), (32, 8, 2), (64, 4, 2), (64, 4, 3))
    tiles = few_heads if heads == MIN_TILE and not has_wide_rows(record) else many_heads
    if record.query.dtype.itemsize > 2:
        heads = min(heads, 16 if has_wide_rows(record) else 32)
        tiles = ((16, 8, 1), (16, 4, 1)) if has_wide_rows(record) else ((32, 4, 2), (32, 4, 1), (16, 4, 2))
    return [SparseForward(heads=heads, block_kv=k, num_warps=w, num_stages=s) for k, w, s in tiles]


def _backward_configs(record: TokenSparseAttention) -> list[SparseBackward]:
    heads, keys = padded_heads_per_program(record), _keys_per_tile(record)
    if is_interpreting():
        heads, keys = min(heads, MIN_TILE), MIN_TILE
    is_wide = has_wide_rows(record)
    # Rows of 576: the gradient of 4096 queries takes 18.0 ms with 32 heads and four warps, 23.6 with 64 and eight, 34.5
    # with 32 and eight; that of their keys 51 ms, 73 with two stages, 57 with 64 heads and 16 keys (docs/lab as above).
    default = SparseBackward(
        heads=min(heads, 32) if is_wide else heads,
        block_kv=min(keys, 32) if is_wide else keys,
        num_warps=4,
        num_stages=2,
        key_heads=min(heads, 32) if is_wide else heads,
        key_block_kv=min(keys, 32) if is_wide else keys,
        key_warps=8 if is_wide else 4,
        key_stages=1 if is_wide else 2,
    )
    if is_interpreting():
        return [default]
    half_keys, half_heads = max(default.block_kv // 2, MIN_TILE), max(default.key_heads // 2, MIN_TILE)
    return [
        default,
        dataclasses.replace(default, block_kv=half_keys, num_warps=2),
        dataclasses.replace(default, heads=heads, num_warps=8),
        dataclasses.replace(default, key_block_kv=half_keys),
        dataclasses.replace(default, key_heads=half_heads, key_stages=2),
    ]


def padded_heads_per_program(record: TokenSparseAttention) -> int:
    """Returns the query heads of a program: those of a KV head, padded for `tl.dot`, or MAX_HEADS_PER_PROGRAM."""
    return min(pad_to_dot_size(record.query.shape[2] // record.key.shape[2]), MAX_HEADS_PER_PROGRAM)


def _padded_row_columns(record: TokenSparseAttention) -> int:
    """Returns the padded columns of a query's row."""
    return sum(key_tile_columns(record.query.shape[3]))


def has_wide_rows(record: TokenSparseAttention) -> bool:
    """Returns whether a row has so many columns that accumulators for it take most registers."""
    return max(_padded_row_columns(record), record.value_size) > 256


def _keys_per_tile(record: TokenSparseAttention) -> int:
    """Returns the listed keys of a tile before shared memory is considered."""
    return 64 if record.query.dtype.itemsize <= 2 and _padded_row_columns(record) <= 576 else 32


def shrink_to_shared_memory(record: TokenSparseAttention, config: Any, chip: Gpu) -> Any:
    """Returns the configuration with fewer keys, stages and heads until it fits the chip; the smallest if none fits."""
    prefixes = ("", "key_") if isinstance(config, SparseBackward) else ("",)
    for prefix in prefixes:
        keys, stages = f"{prefix}block_kv", "key_stages" if prefix else "num_stages"
        steps = ((keys, 2 * MIN_TILE), (stages, 1), (f"{prefix}heads", MIN_TILE), (keys, MIN_TILE))
        needed_bytes = functools.partial(_program_bytes, record, prefix=prefix)
        config = shrink_until_it_fits(config, needed_bytes, chip.shared_memory, steps)
    return config


def shared_memory_bytes(record: TokenSparseAttention, config: Any) -> int:
    """Returns the bytes of the largest program of a pass."""
    prefixes = ("", "key_") if isinstance(config, SparseBackward) else ("",)
    return max(_program_bytes(record, config, prefix) for prefix in prefixes)


def _program_bytes(record: TokenSparseAttention, config: Any, prefix: str) -> int:
    """Returns the bytes of a program: the rows that it keeps, tiles of those that it loops over, and weights."""
    bytes_per_element, backward = record.query.dtype.itemsize, isinstance(config, SparseBackward)
    columns, values = _padded_row_columns(record), pad_to_power_of_two(record.value_size, MIN_TILE)
    key_columns = columns + (0 if value_is_first_tile(record) else values)
    query_columns = columns + (values if backward else 0)
    heads, keys = getattr(config, f"{prefix}heads"), getattr(config, f"{prefix}block_kv")
    stages = config.key_stages if prefix else config.num_stages
    resident, streamed = heads * query_columns, keys * key_columns
    if prefix:
        resident, streamed = streamed, resident
    # Without a pipeline, a tile that is an operand of two products is there twice.
    streamed += (heads if prefix else keys) * values if stages == 1 else 0
    splits = 2 if bytes_per_element > 2 else 1  # float32 operands are split in two
    weights = splits * heads * keys
    needed = (splits * resident + stages * streamed + weights) * bytes_per_element
    return max(needed, 4 * heads * values if not prefix else 4 * keys * columns) + KIBI
