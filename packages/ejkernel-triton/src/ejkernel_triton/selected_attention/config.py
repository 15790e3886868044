"""Tile sizes and launch parameters of the selected-attention kernels, and the tiles that shared memory holds.

Triton's compiler determines the shared memory of a kernel; `shared_memory_bytes` follows its version 3.9 for programs
with many query heads per KV head.
"""

import dataclasses
from typing import Any

from ejkernel.families.selected_attention import FAMILY, SelectedAttention, blocks_per_query
from ejkernel.ops.chips import KIBI, Gpu, gpu_of
from ejkernel.ops.device import DeviceInfo
from ejkernel.ops.params import Direction
from ejkernel.planning.fixed_sizes import with_fixed_sizes
from ejkernel_triton.launch import is_interpreting
from ejkernel_triton.sizes import pad_to_dot_size, pad_to_power_of_two

MIN_LIST_LENGTH = 512
"""The smallest number of queries of a block's list that one program loops over before the list is split.

On an H200, 8192 queries: 1.38 ms with 256, 1.39 with 512, 1.55 with 1024 (docs/lab/native_sparse_attention_gpu.md).
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SelectedForward:
    """Configuration of the forward kernel.

    Attributes:
        block_kv: Keys of a listed block per tile.
        num_warps: Warps per program.
        num_stages: Pipeline stages of the copies of key and value tiles.
    """

    block_kv: int
    num_warps: int
    num_stages: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class SelectedBackward:
    """Configuration of the two backward kernels, `selected_bwd_dq_kernel` and `selected_bwd_dkdv_kernel`.

    Attributes:
        block_kv: Keys per tile in the loop of `selected_bwd_dq_kernel`.
        num_warps: Warps per program of `selected_bwd_dq_kernel`.
        num_stages: Pipeline stages of `selected_bwd_dq_kernel`.
        key_block_kv: Keys that a program of `selected_bwd_dkdv_kernel` accumulates gradients for.
        block_q: Queries per tile in the loop of `selected_bwd_dkdv_kernel`.
        list_length: Queries of a block's list that one program loops over; longer lists are split and merged.
        key_warps: Warps per program of `selected_bwd_dkdv_kernel`.
        key_stages: Pipeline stages of `selected_bwd_dkdv_kernel`.
    """

    block_kv: int
    num_warps: int
    num_stages: int
    key_block_kv: int
    block_q: int
    list_length: int
    key_warps: int
    key_stages: int


PUBLIC_FIELDS = {
    "block_k": "block_kv",
    "num_warps": "num_warps",
    "num_stages": "num_stages",
}
"""Maps fields of the public configuration to fields of these; in the backward pass to those of
`selected_bwd_dq_kernel`.
"""

QUERY_TILES = ((64, 1, 2), (32, 1, 3), (32, 1, 2), (32, 1, 4), (64, 2, 2), (64, 2, 3), (32, 2, 3), (64, 4, 2))
"""Keys, warps and stages of programs of one query each that are worth measuring."""

MIN_TILE = 16
"""The smallest side of a tile that `tl.dot` supports."""

MIN_WGMMA_ROWS, MIN_WGMMA_WARPS = 64, 4
"""Rows and warps from which on Hopper uses WGMMA, which reads shared memory, so that it holds every stage."""


def tuned_table_key(record: SelectedAttention) -> str | None:
    """Returns the key of a shipped table entry, for calls with enough work for a large GPU; else None."""
    batch, tokens, heads, head_dim = record.query.shape
    if batch * tokens * heads < 2**18:
        return None
    bits = 8 * record.query.dtype.itemsize
    sizes = f"{pad_to_dot_size(head_dim)}x{pad_to_dot_size(record.value.shape[3])}"
    padded_group_size = 1 << (group_size(record) - 1).bit_length()
    length = "short" if tokens <= 4096 else "medium" if tokens <= 16384 else "long"
    segments = " segments" if record.q_segment_ids is not None else ""
    return f"{bits} bits {sizes} group {padded_group_size} blocks of {record.block_size} {length}{segments}"


def group_size(record: SelectedAttention) -> int:
    """Returns query heads per KV head."""
    return record.query.shape[2] // record.key.shape[2]


def heuristic(
    record: SelectedAttention, device: DeviceInfo, direction: Direction
) -> SelectedForward | SelectedBackward:
    """Returns the default tile sizes for a record on a device, not measured."""
    return candidates(record, device, direction)[0]


def batch_invariant(
    record: SelectedAttention, device: DeviceInfo, direction: Direction
) -> SelectedForward | SelectedBackward:
    """Returns the tile sizes for all calls in a `batch_invariant` block."""
    return heuristic(with_fixed_sizes(record, FAMILY.axes_of(record), {"b": 1, "t": 1}), device, direction)


def candidates(
    record: SelectedAttention, device: DeviceInfo, direction: Direction
) -> tuple[SelectedForward | SelectedBackward, ...]:
    """Returns tile sizes worth measuring for a record on a device, the most likely first."""
    configs = _forward_configs(record, device) if direction == "forward" else _backward_configs(record, device)
    return tuple(dict.fromkeys(shrink_to_shared_memory(record, x, gpu_of(device)) for x in configs))


def shared_memory_refusal(record: SelectedAttention, device: DeviceInfo) -> str:
    """Returns why the kernels cannot run for a record on a device; empty where they can."""
    chip = gpu_of(device)
    directions: tuple[Direction, ...] = ("forward", "backward")
    needed_bytes = max(shared_memory_bytes(record, heuristic(record, device, x), chip) for x in directions)
    if needed_bytes <= chip.shared_memory:
        return ""
    heads = f"{group_size(record)} query heads a KV head take up to {needed_bytes} bytes of shared memory"
    return f"{heads}, and {chip.target} has {chip.shared_memory}"


def _forward_configs(record: SelectedAttention, device: DeviceInfo) -> list[SelectedForward]:
    block_kv, warps = _query_program_tile(record, "forward")
    if is_interpreting():
        return [SelectedForward(block_kv=block_kv, num_warps=4, num_stages=2)]
    tiles = ((block_kv, warps, 2), *QUERY_TILES)
    return [SelectedForward(block_kv=k, num_warps=w, num_stages=s) for k, w, s in tiles if k <= block_kv]


def _backward_configs(record: SelectedAttention, device: DeviceInfo) -> list[SelectedBackward]:
    length = max(MIN_LIST_LENGTH, pad_to_dot_size(record.query.shape[1] * blocks_per_query(record) // 256))
    block_kv, warps = _query_program_tile(record, "backward")
    key_block_kv, query_rows, key_warps = _key_program_tile(record, device)
    default = SelectedBackward(
        block_kv=block_kv,
        num_warps=warps,
        num_stages=2,
        key_block_kv=key_block_kv,
        block_q=max(1, query_rows // group_size(record)),
        list_length=8 if is_interpreting() else length,
        key_warps=key_warps,
        key_stages=2,
    )
    if is_interpreting():
        return [default]
    query_kernel_configs = [
        dataclasses.replace(default, block_kv=key_kernel_configs, num_warps=warps, num_stages=stages)
        for key_kernel_configs, warps, stages in QUERY_TILES
        if key_kernel_configs <= block_kv
    ]
    key_kernel_configs = [
        dataclasses.replace(default, key_warps=key_warps, key_stages=stages, block_q=max(1, default.block_q // divisor))
        for stages, divisor in ((2, 1), (3, 1), (2, 2), (3, 2))
    ]
    list_length_configs = [dataclasses.replace(default, list_length=n) for n in (length // 2, 2 * length, 4 * length)]
    return [default, *query_kernel_configs, *key_kernel_configs, *list_length_configs]


def _query_program_tile(record: SelectedAttention, direction: Direction) -> tuple[int, int]:
    """Returns keys and warps of programs of one query each: the fewest warps whose registers hold the tile."""
    if is_interpreting():
        return min(pad_to_dot_size(record.block_size), 16), 4
    # One warp needs no barrier and no exchange through shared memory: 1.6 ms forward with 64 keys and two stages, where
    # four warps take 1.95. The kernel of dq spills with one warp (docs/lab/native_sparse_attention_gpu.md).
    row, is_float32 = _longest_row_bytes(record), record.query.dtype.itemsize > 2
    keys = min(pad_to_dot_size(record.block_size), 64 if not is_float32 or row <= 256 else 32 if row <= 512 else 16)
    if is_float32 or row > 256 or group_size(record) > 16:
        return keys, 4
    return keys, 1 if direction == "forward" else 2


def _key_program_tile(record: SelectedAttention, device: DeviceInfo) -> tuple[int, int, int]:
    """Returns keys, query rows and warps of `selected_bwd_dkdv_kernel`: the largest accumulators that fit registers."""
    if is_interpreting():
        return min(pad_to_dot_size(record.block_size), 16), 16, 4
    row, is_float32 = _longest_row_bytes(record), record.query.dtype.itemsize > 2
    architecture = gpu_of(device).architecture
    if is_float32:
        keys, query_rows, warps = (32, 32, 4) if row <= 256 else (16, 16, 4)
    elif row <= 256:
        # 1.39 ms on an H200; 32 rows 1.66, 32 keys 2.33, eight warps 2.69 (docs/lab/native_sparse_attention_gpu.md).
        keys, query_rows, warps = 64, 64 if architecture in ("ampere", "hopper", "blackwell") else 32, 4
    elif architecture == "cdna3":
        keys, query_rows, warps = 32, 32, 4
    else:
        keys, query_rows, warps = 64 if record.query.shape[3] + record.value.shape[3] <= 320 else 32, 32, 8
    return min(keys, pad_to_dot_size(record.block_size)), query_rows, warps


def _longest_row_bytes(record: SelectedAttention) -> int:
    """Returns the padded bytes of the longest row."""
    return pad_to_dot_size(max(record.query.shape[3], record.value.shape[3])) * record.query.dtype.itemsize


def shrink_to_shared_memory(record: SelectedAttention, config: Any, chip: Gpu) -> Any:
    """Returns the configuration with fewer keys and stages until it fits the chip; the smallest one if none fits."""
    backward = hasattr(config, "key_block_kv")
    while _query_program_bytes(record, config, chip, backward) > chip.shared_memory:
        if (smaller := _shrink_config(config, "block_kv", "num_stages")) is None:
            break
        config = smaller
    while backward and _key_program_bytes(record, config, chip) > chip.shared_memory:
        if (smaller := _shrink_config(config, "key_block_kv", "key_stages")) is None:
            break
        config = smaller
    return config


def _shrink_config(config: Any, keys: str, stages: str) -> Any:
    """Returns the configuration with half the keys of a program, or a stage less; None for the smallest one."""
    if getattr(config, keys) > MIN_TILE:
        return dataclasses.replace(config, **{keys: getattr(config, keys) // 2})
    if getattr(config, stages) > 1:
        return dataclasses.replace(config, **{stages: getattr(config, stages) - 1})
    return None


def shared_memory_bytes(record: SelectedAttention, config: Any, chip: Gpu) -> int:
    """Returns the bytes of the largest program of a pass."""
    backward = hasattr(config, "key_block_kv")
    query_program_bytes = _query_program_bytes(record, config, chip, backward)
    return max(query_program_bytes, _key_program_bytes(record, config, chip)) if backward else query_program_bytes


def _padded_group_rows(record: SelectedAttention) -> int:
    return pad_to_power_of_two(record.query.shape[2] // record.key.shape[2], MIN_TILE)


def _padded_head_dims(record: SelectedAttention) -> tuple[int, int]:
    return pad_to_power_of_two(record.query.shape[3], MIN_TILE), pad_to_power_of_two(record.value.shape[3], MIN_TILE)


def _shared_memory_stages(chip: Gpu, query_rows: int, warps: int, stages: int) -> int:
    """Returns the pipeline stages in shared memory: all for Hopper's and Blackwell's products, else the last is in
    registers.
    """
    uses_wgmma = chip.architecture in ("hopper", "blackwell")
    return stages if uses_wgmma and query_rows >= MIN_WGMMA_ROWS and warps >= MIN_WGMMA_WARPS else stages - 1


def _query_program_bytes(record: SelectedAttention, config: Any, chip: Gpu, backward: bool) -> int:
    """Returns the bytes of a query's program: its heads' rows, in the backward pass the cotangent's, and tiles of
    keys.
    """
    query_rows, (keys, values), head_dim = (
        _padded_group_rows(record),
        _padded_head_dims(record),
        record.query.dtype.itemsize,
    )
    operand_splits = 2 if head_dim > 2 and chip.vendor == "nvidia" else 1  # float32 operands are split in two
    copied_bytes = (
        _shared_memory_stages(chip, query_rows, config.num_warps, config.num_stages)
        * config.block_kv
        * (keys + values)
        * head_dim
    )
    weight_bytes = operand_splits * query_rows * config.block_kv * head_dim
    if chip.vendor == "amd":  # registers hold the rows, and 16-bit weights of 16 rows
        weight_bytes = 0 if query_rows == MIN_TILE and head_dim <= 2 else weight_bytes
        return max(copied_bytes + weight_bytes, query_rows * max(keys, values) * head_dim)
    query_bytes = operand_splits * query_rows * (keys + (values if backward else 0)) * head_dim
    return (
        max(
            query_bytes + copied_bytes + (0 if backward and head_dim > 2 else weight_bytes),
            4 * query_rows * max(keys, values),
        )
        + KIBI // 2
    )


def _key_program_bytes(record: SelectedAttention, config: Any, chip: Gpu) -> int:
    """Returns the bytes of a program of one tile of keys: those, their values, and tiles of queries and cotangents."""
    (keys, values), head_dim = _padded_head_dims(record), record.query.dtype.itemsize
    query_rows = pad_to_power_of_two(config.block_q * (record.query.shape[2] // record.key.shape[2]), MIN_TILE)
    num_shared_stages = _shared_memory_stages(chip, config.key_block_kv, config.key_warps, config.key_stages)
    copied_bytes = max(num_shared_stages, 1) * query_rows * (keys + values) * head_dim
    if chip.vendor == "amd":
        return copied_bytes if num_shared_stages else query_rows * max(keys, values) * head_dim
    return copied_bytes + (config.key_block_kv * (keys + values) + config.key_block_kv * query_rows) * head_dim + KIBI
