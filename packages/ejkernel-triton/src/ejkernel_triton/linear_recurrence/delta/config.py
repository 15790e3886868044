"""Chunks, tiles and launch parameters of the delta rule's kernels."""

import dataclasses
from typing import Any

from ejkernel.arithmetic import cdiv
from ejkernel.families.linear_recurrence import LinearRecurrence, has_decay_per_channel, num_state_heads
from ejkernel.ops.chips import gpu_of
from ejkernel.ops.device import DeviceInfo
from ejkernel.ops.params import Direction
from ejkernel_triton.launch import is_interpreting
from ejkernel_triton.linear_recurrence.chunked.config import (
    config_as_dict,
    fits_fused_scan,
    make_chunked_config,
    num_sequences,
)
from ejkernel_triton.linear_recurrence.config import DEFAULT_WARPS, MIN_TILE, ChunkedConfig
from ejkernel_triton.sizes import pad_to_power_of_two


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeltaRuleConfig(ChunkedConfig):
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


def _forward_config(record: LinearRecurrence, device: DeviceInfo) -> ChunkedConfig:
    """Returns chunks and tiles of the forward pass for a record with beta on a device."""
    config, multiprocessors = make_chunked_config(record, device, 64), gpu_of(device).multiprocessors
    value_dim, block_v = record.value.shape[3], config.state_block_v
    num_scans, segments = record.query.shape[0] * num_sequences(record) * num_state_heads(record), config.segments
    if not is_interpreting():
        # With segments, tokens are scanned two more times, so one scan per multiprocessor suffices: 65536 tokens of 16
        # heads take 2.43 ms with 4 segments, 2.55 with 8, and 2.66 with none and narrow tiles.
        segments = multiprocessors // (num_scans * cdiv(value_dim, block_v)) if fits_fused_scan(record, device) else 1
        segments = (
            max(1, min(segments, record.query.shape[1] // (16 * config.chunk))) if record.cu_seqlens is None else 1
        )
    # A scan has all key channels of a state, so there are few scans: tiles are made narrower to fill the chip.
    min_programs = 3 * multiprocessors // 4
    while (
        not is_interpreting() and block_v > MIN_TILE and num_scans * segments * cdiv(value_dim, block_v) < min_programs
    ):
        block_v //= 2
    return dataclasses.replace(
        config,
        chunk=min(config.chunk, 64),  # the triangular matrices of 128 tokens do not fit the registers
        segments=segments,
        state_block_v=block_v,
        output_block_v=min(config.output_block_v, 64),
    )


def heuristic(record: LinearRecurrence, device: DeviceInfo, direction: Direction) -> DeltaRuleConfig:
    """Returns the default chunks and tiles of both passes for a record with beta on a device, not measured."""
    config, chip = _forward_config(record, device), gpu_of(device)
    has_small_shared_memory, is_hopper = chip.shared_memory < 128 * 1024, chip.architecture == "hopper"
    key_dim, value_dim = (pad_to_power_of_two(x.shape[3], MIN_TILE) for x in (record.query, record.value))
    has_channel_gates = has_decay_per_channel(record)
    needs_one_state_stage = has_small_shared_memory and (has_channel_gates or record.decay is None)
    # Programs that pass states hold all key channels: except on Hopper, one pass or the other spills with more than 32
    # columns.
    block_v = min(config.state_block_v, 64 if is_hopper else 32)
    # The most channels with which the kernel spills no register, except on Hopper.
    max_wy_block_k = {"hopper": 64, "ampere": 16, "ada": 16}.get(chip.architecture, 32)
    fields: dict[str, Any] = config_as_dict(config) | {
        "backward_chunk": config.chunk,
        "state_block_v": block_v,
        "state_stages": 1 if needs_one_state_stage else config.state_stages,
        # A program has three products in flight.
        "gradient_block_k": min(
            config.gradient_block_k, 64 if is_hopper else MIN_TILE if has_small_shared_memory else 32
        ),
        "gradient_block_v": min(config.gradient_block_v, MIN_TILE if has_small_shared_memory else 64),
        "fused": record.cu_seqlens is not None if is_interpreting() else _uses_fused_scan(record, device, block_v),
        "fused_block_v": block_v,
        "wy_block_k": min(config.score_block_k, max_wy_block_k) if has_channel_gates else config.score_block_k,
        "wy_block_v": config.output_block_v,
        "wy_warps": DEFAULT_WARPS,
    }
    if is_hopper and record.query.dtype.itemsize == 2 and not is_interpreting():
        # With a gate per head, the WY form of all channels at once takes 0.237 ms instead of 0.269 with 64.
        # Packed and with a gate per head, masks take registers, and 64 channels leave room for a third program: 0.738
        # ms instead of 0.753.
        # With gates per key channel, 64 channels take 1.13 ms though they spill 136 bytes, 32 channels 1.65.
        max_wy_block = 64 if record.cu_seqlens is not None and not has_channel_gates else 128
        fields |= {
            "wy_block_k": min(key_dim, max_wy_block_k if has_channel_gates else max_wy_block),
            "wy_block_v": min(value_dim, max_wy_block),
        }
        fields["output_block_v"] = min(value_dim, 128 if has_channel_gates else 64)
    return DeltaRuleConfig(**fields, dh_block_v=block_v, dh_warps=4, dh_stages=1 if has_small_shared_memory else 2)


def _uses_fused_scan(record: LinearRecurrence, device: DeviceInfo, block_v: int) -> bool:
    """Returns whether one kernel computes states and outputs of a delta rule."""
    # With a gate per head it takes 0.713 ms instead of 0.712 with two kernels, and with gradients 2.375 instead of
    # 2.180; with packed sequences 0.763 instead of 1.045 (docs/lab/linear_recurrence_gpu.md).
    is_faster = record.decay is not None and (has_decay_per_channel(record) or record.cu_seqlens is not None)
    return is_faster and block_v == 64 and fits_fused_scan(record, device)


def candidates(record: LinearRecurrence, device: DeviceInfo, direction: Direction) -> tuple[DeltaRuleConfig, ...]:
    """Returns configurations of both passes worth measuring for a record with beta on a device."""
    default = heuristic(record, device, direction)
    if is_interpreting():
        return (default, dataclasses.replace(default, keep_states=False, fused=not default.fused, segments=1))
    configs = [dataclasses.replace(default, fused=False, keep_states=keep_states) for keep_states in (True, False)]
    configs += [
        dataclasses.replace(default, segments=n) for n in (default.segments // 2, 2 * default.segments) if n > 1
    ]
    value_blocks = [n for n in (16, 32, 64) if _state_fits_shared_memory(record, device, n)]
    configs += [dataclasses.replace(configs[0], state_block_v=n) for n in value_blocks]
    configs += [dataclasses.replace(default, wy_block_k=64, wy_block_v=64)]
    configs += [dataclasses.replace(default, wy_block_k=n, wy_warps=8) for n in (32, 64)]
    configs += [dataclasses.replace(default, dh_block_v=n) for n in value_blocks]
    configs += [dataclasses.replace(default, dh_warps=8)]
    configs += [dataclasses.replace(default, gradient_block_k=n, gradient_stages=1) for n in (16, 32, 64)]
    return tuple(dict.fromkeys((default, *configs)))


def _state_fits_shared_memory(record: LinearRecurrence, device: DeviceInfo, num_columns: int) -> bool:
    """Returns whether shared memory holds `num_columns` columns of a state, all key channels, and a chunk of keys."""
    chip, itemsize = gpu_of(device), record.query.dtype.itemsize
    operand_splits = 2 if itemsize > 2 and chip.vendor == "nvidia" else 1  # float32 operands are split in two
    rows = operand_splits * num_columns + (32 if itemsize > 2 else 64)
    return pad_to_power_of_two(record.query.shape[3], MIN_TILE) * rows * itemsize <= chip.shared_memory
