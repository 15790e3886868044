"""Chunks, tiles and launch parameters of the delta rule's kernels."""

import dataclasses
from typing import Any

from ejkernel.arithmetic import cdiv
from ejkernel.families.linear_recurrence import LinearRecurrence, by_channel, head_count
from ejkernel.ops.chips import gpu_of
from ejkernel.ops.device import DeviceInfo
from ejkernel.ops.params import Direction
from ejkernel_triton.launch import interpreting
from ejkernel_triton.linear_recurrence.chunked.config import config_fields, fits_fused_scan, sequence_count, sized
from ejkernel_triton.linear_recurrence.config import MIN_TILE, WARPS, ChunkPasses
from ejkernel_triton.sizes import (
    padded,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeltaPasses(ChunkPasses):
    """Configuration of both passes of the delta rule.

    Attributes:
        wy_block_k: Key channels per step of the kernel of the WY form.
        wy_block_v: Value channels per step of that kernel.
        wy_warps: Warps per program of that kernel.
        dh_block_v: Value channels per program that passes gradients of states, from the last chunk to the first; it has
            all key channels.
        dh_warps: Warps per program of that kernel.
        dh_stages: Its pipeline stages; fewer if shared memory is too small.
    """

    wy_block_k: int
    wy_block_v: int
    wy_warps: int
    dh_block_v: int
    dh_warps: int
    dh_stages: int


def _forward_sizes(record: LinearRecurrence, device: DeviceInfo) -> ChunkPasses:
    """Returns chunks and tiles of the forward pass for a record with beta on a device."""
    made, multiprocessors = sized(record, device, 64), gpu_of(device).multiprocessors
    columns, block = record.value.shape[3], made.state_block_v
    scans, segments = record.query.shape[0] * sequence_count(record) * head_count(record), made.segments
    if not interpreting():
        # With segments, tokens are scanned two more times, so one scan per multiprocessor suffices: 65536 tokens of 16
        # heads take 2.43 ms with 4 segments, 2.55 with 8, and 2.66 with none and narrow tiles.
        segments = multiprocessors // (scans * cdiv(columns, block)) if fits_fused_scan(record, device) else 1
        segments = max(1, min(segments, record.query.shape[1] // (16 * made.chunk))) if record.cu_seqlens is None else 1
    # A scan has all key channels of a state, so there are few scans: tiles are made narrower to fill the chip.
    enough = 3 * multiprocessors // 4
    while not interpreting() and block > MIN_TILE and scans * segments * cdiv(columns, block) < enough:
        block //= 2
    return dataclasses.replace(
        made,
        chunk=min(made.chunk, 64),  # the triangular matrices of 128 tokens do not fit the registers
        segments=segments,
        state_block_v=block,
        output_block_v=min(made.output_block_v, 64),
    )


def heuristic(record: LinearRecurrence, device: DeviceInfo, direction: Direction) -> DeltaPasses:
    """Returns the default chunks and tiles of both passes for a record with beta on a device, not measured."""
    made, chip = _forward_sizes(record, device), gpu_of(device)
    small, hopper = chip.shared_memory < 128 * 1024, chip.architecture == "hopper"
    keys, values = padded(record.query.shape[3], MIN_TILE), padded(record.value.shape[3], MIN_TILE)
    # Programs that pass states hold all key channels: except on Hopper, one pass or the other spills with more than 32
    # columns.
    block = min(made.state_block_v, 64 if hopper else 32)
    # As many as spill nothing, but on Hopper.
    channels = {"hopper": 64, "ampere": 16, "ada": 16}.get(chip.architecture, 32)
    fields: dict[str, Any] = config_fields(made) | {
        "backward_chunk": made.chunk,
        "state_block_v": block,
        "state_stages": 1 if small and (by_channel(record) or record.decay is None) else made.state_stages,
        # A program has three products in flight.
        "gradient_block_k": min(made.gradient_block_k, 64 if hopper else MIN_TILE if small else 32),
        "gradient_block_v": min(made.gradient_block_v, MIN_TILE if small else 64),
        "fused": record.cu_seqlens is not None if interpreting() else _fuses(record, device, block),
        "fused_block_v": block,
        "wy_block_k": min(made.score_block_k, channels) if by_channel(record) else made.score_block_k,
        "wy_block_v": made.output_block_v,
        "wy_warps": WARPS,
    }
    if hopper and record.query.dtype.itemsize == 2 and not interpreting():
        # With a gate per head, the WY form of all channels at once takes 0.237 ms instead of 0.269 with 64.
        # Packed and with a gate per head, masks take registers, and 64 channels leave room for a third program: 0.738
        # ms instead of 0.753.
        # With gates per key channel, 64 channels take 1.13 ms though they spill 136 bytes, 32 channels 1.65.
        most = 64 if record.cu_seqlens is not None and not by_channel(record) else 128
        fields |= {"wy_block_k": min(keys, channels if by_channel(record) else most), "wy_block_v": min(values, most)}
        fields["output_block_v"] = min(values, 128 if by_channel(record) else 64)
    return DeltaPasses(**fields, dh_block_v=block, dh_warps=4, dh_stages=1 if small else 2)


def _fuses(record: LinearRecurrence, device: DeviceInfo, block: int) -> bool:
    """Returns whether one kernel computes states and outputs of a delta rule."""
    # With a gate per head it takes 0.713 ms instead of 0.712 with two kernels, and with gradients 2.375 instead of
    # 2.180; with packed sequences 0.763 instead of 1.045 (docs/lab/linear_recurrence_gpu.md).
    wins = record.decay is not None and (by_channel(record) or record.cu_seqlens is not None)
    return wins and block == 64 and fits_fused_scan(record, device)


def candidates(record: LinearRecurrence, device: DeviceInfo, direction: Direction) -> tuple[DeltaPasses, ...]:
    """Returns configurations of both passes worth measuring for a record with beta on a device."""
    default = heuristic(record, device, direction)
    if interpreting():
        return (default, dataclasses.replace(default, keep_states=False, fused=not default.fused, segments=1))
    made = [dataclasses.replace(default, fused=False, keep_states=keep) for keep in (True, False)]
    made += [dataclasses.replace(default, segments=n) for n in (default.segments // 2, 2 * default.segments) if n > 1]
    columns = [n for n in (16, 32, 64) if _holds_state(record, device, n)]
    made += [dataclasses.replace(made[0], state_block_v=n) for n in columns]
    made += [dataclasses.replace(default, wy_block_k=64, wy_block_v=64)]
    made += [dataclasses.replace(default, wy_block_k=n, wy_warps=8) for n in (32, 64)]
    made += [dataclasses.replace(default, dh_block_v=n) for n in columns]
    made += [dataclasses.replace(default, dh_warps=8)]
    made += [dataclasses.replace(default, gradient_block_k=n, gradient_stages=1) for n in (16, 32, 64)]
    return tuple(dict.fromkeys((default, *made)))


def _holds_state(record: LinearRecurrence, device: DeviceInfo, columns: int) -> bool:
    """Returns whether shared memory holds all key channels of `columns` columns of a state, and of a chunk of keys."""
    chip, size = gpu_of(device), record.query.dtype.itemsize
    parts = 2 if size > 2 and chip.vendor == "nvidia" else 1  # float32 operands are split in two
    rows = parts * columns + (32 if size > 2 else 64)
    return padded(record.query.shape[3], MIN_TILE) * rows * size <= chip.shared_memory
