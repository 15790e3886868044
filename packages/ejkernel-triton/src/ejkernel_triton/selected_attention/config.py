"""Tile sizes and launch parameters of the selected-attention kernels."""

import dataclasses

from ejkernel.families.selected_attention import SelectedAttention, slots
from ejkernel.ops.config.params import Direction
from ejkernel.ops.device import DeviceInfo
from ejkernel_triton.launch import interpreting

SCORE_ROWS = 64
"""Query rows, all heads of a KV head counted, that a program that owns keys visits at once."""

LIST = 512
"""Queries of a block's list that one program walks, at least."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SelectedForward:
    """Configuration of the forward kernel.

    Attributes:
        block_kv: Keys of a listed block a tile.
        transposed: Whether tiles of scores are [keys, heads], so that keys are the long side of a matrix instruction.
        num_warps: Warps a program.
        num_stages: Pipeline stages: tiles of keys and values that are copied ahead.
    """

    block_kv: int
    transposed: bool
    num_warps: int
    num_stages: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class SelectedBackward:
    """Configuration of the backward kernels: of programs that own a query, and of those that own a block of keys.

    Attributes:
        block_kv: Keys a tile, visited or owned.
        transposed: As in `SelectedForward`, of programs that own a query; those that own keys always are.
        query_warps: Warps of a program that owns a query.
        query_stages: Its pipeline stages.
        block_q: Queries a tile that a program that owns keys visits.
        list_length: Queries of a block's list that one program walks; longer lists are split and merged.
        key_warps: Warps of a program that owns keys.
        key_stages: Its pipeline stages.
    """

    block_kv: int
    transposed: bool
    query_warps: int
    query_stages: int
    block_q: int
    list_length: int
    key_warps: int
    key_stages: int


FACES = {
    "block_q": "block_q",
    "block_k": "block_kv",
    "num_warps": "num_warps",
    "num_stages": "num_stages",
}
"""Fields of the public configuration and what they set here."""


def padded(size: int) -> int:
    """The power of two, at least 16, that a matrix product takes for a size."""
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
    if direction == "forward":
        return tuple(dict.fromkeys(_forward(record, device)))
    return tuple(dict.fromkeys(_backward(record, device)))


def _forward(record: SelectedAttention, device: DeviceInfo) -> list[SelectedForward]:
    block = _block_kv(record)
    if interpreting():
        return [SelectedForward(block_kv=block, transposed=x, num_warps=4, num_stages=2) for x in (True, False)]
    transposed = [
        SelectedForward(block_kv=min(block, keys), transposed=True, num_warps=4, num_stages=stages)
        for keys, stages in ((64, 2), (64, 3), (64, 4), (64, 1))
    ]
    straight = [
        SelectedForward(block_kv=min(block, keys), transposed=False, num_warps=warps, num_stages=stages)
        for keys, warps, stages in ((64, 4, 3), (64, 2, 3), (64, 1, 2), (32, 1, 3), (64, 2, 2), (64, 4, 2))
    ]
    return transposed + straight


def _backward(record: SelectedAttention, device: DeviceInfo) -> list[SelectedBackward]:
    block = _block_kv(record)
    length = max(LIST, padded(record.query.shape[1] * slots(record) // 256))
    made = SelectedBackward(
        block_kv=block,
        transposed=True,
        query_warps=4,
        query_stages=2,
        block_q=max(1, SCORE_ROWS // group_size(record)),
        list_length=length,
        key_warps=4,
        key_stages=2,
    )
    if interpreting():
        return [dataclasses.replace(made, list_length=8, block_q=max(1, 16 // group_size(record)), transposed=False)]
    queries = [
        {"transposed": t, "query_warps": w, "query_stages": s}
        for t, w, s in ((True, 4, 3), (True, 4, 1), (False, 4, 3), (False, 4, 2), (False, 2, 2), (False, 1, 2))
    ]
    keys = [
        {"key_warps": w, "key_stages": s, "block_q": made.block_q * m}
        for w, s, m in ((4, 3, 1), (8, 2, 1), (8, 3, 1), (8, 2, 2), (4, 1, 1))
    ]
    lengths = [{"list_length": 2 * length}, {"list_length": 4 * length}]
    return [made, *(dataclasses.replace(made, **x) for x in (*queries, *keys, *lengths))]


def _block_kv(record: SelectedAttention) -> int:
    """Keys a tile: a block, or a part of a long one; rows of float32 and long rows leave room for fewer."""
    row = padded(max(record.query.shape[3], record.value.shape[3])) * record.query.dtype.itemsize
    return min(padded(record.block_size), 64 if row <= 256 else 32 if row <= 512 else 16)
