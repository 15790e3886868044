"""Tile sizes and launch parameters of the selected-attention kernels."""

import dataclasses

from ejkernel.families.selected_attention import SelectedAttention, slots
from ejkernel.ops.device import DeviceInfo
from ejkernel.ops.params import Direction
from ejkernel_triton.chips import chip_of
from ejkernel_triton.launch import interpreting
from ejkernel_triton.selected_attention.shared_memory import fitted, shared_memory

MIN_LIST_LENGTH = 512
"""Fewest queries of a block's list that one program loops over before the list is split.

On an H200, 8192 queries: 1.38 ms with 256, 1.39 with 512, 1.55 with 1024 (docs/lab/native_sparse_attention_gpu.md).
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SelectedForward:
    """Configuration of the forward kernel.

    Attributes:
        block_kv: Keys of a listed block a tile.
        num_warps: Warps a program.
        num_stages: Pipeline stages of the copies of key and value tiles.
    """

    block_kv: int
    num_warps: int
    num_stages: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class SelectedBackward:
    """Configuration of the two backward kernels, `queries_kernel` and `keys_kernel`.

    Attributes:
        block_kv: Keys a tile in the loop of `queries_kernel`.
        num_warps: Warps of a program of `queries_kernel`.
        num_stages: Pipeline stages of `queries_kernel`.
        key_block_kv: Keys that a program of `keys_kernel` accumulates gradients for.
        block_q: Queries a tile in the loop of `keys_kernel`.
        list_length: Queries of a block's list that one program loops over; longer lists are split and merged.
        key_warps: Warps of a program of `keys_kernel`.
        key_stages: Pipeline stages of `keys_kernel`.
    """

    block_kv: int
    num_warps: int
    num_stages: int
    key_block_kv: int
    block_q: int
    list_length: int
    key_warps: int
    key_stages: int


FACES = {
    "block_k": "block_kv",
    "num_warps": "num_warps",
    "num_stages": "num_stages",
}
"""Fields of the public configuration and what they set here; in the backward pass they set `queries_kernel`."""


def kind(record: SelectedAttention) -> str | None:
    """What calls with enough work for a large GPU have in common that share a measured configuration."""
    batch, tokens, heads, size = record.query.shape
    if batch * tokens * heads < 2**18:
        return None
    bits = 8 * record.query.dtype.itemsize
    sizes = f"{padded(size)}x{padded(record.value.shape[3])}"
    group = 1 << (group_size(record) - 1).bit_length()
    length = "short" if tokens <= 4096 else "medium" if tokens <= 16384 else "long"
    segments = " segments" if record.q_segment_ids is not None else ""
    return f"{bits} bits {sizes} group {group} blocks of {record.block_size} {length}{segments}"


def padded(size: int) -> int:
    """The power of two of at least 16 that `tl.dot` takes for a size."""
    return max(16, 1 << (size - 1).bit_length())


def group_size(record: SelectedAttention) -> int:
    """Query heads per KV head."""
    return record.query.shape[2] // record.key.shape[2]


def heuristic(
    record: SelectedAttention, device: DeviceInfo, direction: Direction
) -> SelectedForward | SelectedBackward:
    """Tile sizes for a record on a device, not measured."""
    return candidates(record, device, direction)[0]


def candidates(
    record: SelectedAttention, device: DeviceInfo, direction: Direction
) -> tuple[SelectedForward | SelectedBackward, ...]:
    """Tile sizes worth measuring for a record on a device, the most likely first."""
    made = _forward(record, device) if direction == "forward" else _backward(record, device)
    return tuple(dict.fromkeys(fitted(record, x, chip_of(device)) for x in made))


def too_large(record: SelectedAttention, device: DeviceInfo) -> str:
    """Why the kernels cannot run for a record on a device; empty where they can."""
    chip = chip_of(device)
    passes: tuple[Direction, ...] = ("forward", "backward")
    took = max(shared_memory(record, heuristic(record, device, x), chip) for x in passes)
    if took <= chip.shared_memory:
        return ""
    heads = f"{group_size(record)} query heads a KV head take up to {took} bytes of shared memory"
    return f"{heads}, and {chip.target} has {chip.shared_memory}"


def _forward(record: SelectedAttention, device: DeviceInfo) -> list[SelectedForward]:
    block_kv, warps = _query_tile(record, "forward")
    if interpreting():
        return [SelectedForward(block_kv=block_kv, num_warps=4, num_stages=2)]
    tiles = ((block_kv, warps, 2), *TILES)
    return [SelectedForward(block_kv=k, num_warps=w, num_stages=s) for k, w, s in tiles if k <= block_kv]


def _backward(record: SelectedAttention, device: DeviceInfo) -> list[SelectedBackward]:
    length = max(MIN_LIST_LENGTH, padded(record.query.shape[1] * slots(record) // 256))
    block_kv, warps = _query_tile(record, "backward")
    key_block_kv, rows, key_warps = _key_tile(record, device)
    made = SelectedBackward(
        block_kv=block_kv,
        num_warps=warps,
        num_stages=2,
        key_block_kv=key_block_kv,
        block_q=max(1, rows // group_size(record)),
        list_length=8 if interpreting() else length,
        key_warps=key_warps,
        key_stages=2,
    )
    if interpreting():
        return [made]
    queries = [
        dataclasses.replace(made, block_kv=keys, num_warps=warps, num_stages=stages)
        for keys, warps, stages in TILES
        if keys <= block_kv
    ]
    keys = [
        dataclasses.replace(made, key_warps=key_warps, key_stages=stages, block_q=max(1, made.block_q // part))
        for stages, part in ((2, 1), (3, 1), (2, 2), (3, 2))
    ]
    lengths = [dataclasses.replace(made, list_length=n) for n in (length // 2, 2 * length, 4 * length)]
    return [made, *queries, *keys, *lengths]


TILES = ((64, 1, 2), (32, 1, 3), (32, 1, 2), (32, 1, 4), (64, 2, 2), (64, 2, 3), (32, 2, 3), (64, 4, 2))
"""Keys, warps and stages of programs of one query each that are worth measuring."""


def _query_tile(record: SelectedAttention, direction: Direction) -> tuple[int, int]:
    """Keys and warps of programs of one query each: the fewest warps whose registers hold the tile."""
    if interpreting():
        return min(padded(record.block_size), 16), 4
    # One warp needs no barrier and no exchange through shared memory: 1.6 ms forward with 64 keys and two stages,
    # where four warps take 1.95. The kernel of dq spills with one (docs/lab/native_sparse_attention_gpu.md).
    row, wide = _row_bytes(record), record.query.dtype.itemsize > 2
    keys = min(padded(record.block_size), 64 if not wide or row <= 256 else 32 if row <= 512 else 16)
    if wide or row > 256 or group_size(record) > 16:
        return keys, 4
    return keys, 1 if direction == "forward" else 2


def _key_tile(record: SelectedAttention, device: DeviceInfo) -> tuple[int, int, int]:
    """Keys, query rows and warps of programs of `keys_kernel`: the largest accumulators that registers hold."""
    if interpreting():
        return min(padded(record.block_size), 16), 16, 4
    row, wide = _row_bytes(record), record.query.dtype.itemsize > 2
    architecture = chip_of(device).architecture
    if wide:
        keys, rows, warps = (32, 32, 4) if row <= 256 else (16, 16, 4)
    elif row <= 256:
        # 1.39 ms on an H200; 32 rows 1.66, 32 keys 2.33, eight warps 2.69 (docs/lab/native_sparse_attention_gpu.md).
        keys, rows, warps = 64, 64 if architecture in ("ampere", "hopper", "blackwell") else 32, 4
    elif architecture == "cdna3":
        keys, rows, warps = 32, 32, 4
    else:
        keys, rows, warps = 64 if record.query.shape[3] + record.value.shape[3] <= 320 else 32, 32, 8
    return min(keys, padded(record.block_size)), rows, warps


def _row_bytes(record: SelectedAttention) -> int:
    """Bytes of the longest row, padded."""
    return padded(max(record.query.shape[3], record.value.shape[3])) * record.query.dtype.itemsize
