"""Chunks, tiles and launch parameters of the chunked recurrence's kernels."""

import dataclasses
from typing import Any

from jax import lax

from ejkernel.arithmetic import cdiv
from ejkernel.families.linear_recurrence import LinearRecurrence, has_decay_per_channel, num_state_heads
from ejkernel.ops.chips import gpu_of
from ejkernel.ops.device import DeviceInfo
from ejkernel.ops.params import Direction
from ejkernel_triton.launch import is_interpreting
from ejkernel_triton.linear_recurrence.config import MIN_TILE, ChunkedConfig
from ejkernel_triton.sizes import pad_to_power_of_two


@dataclasses.dataclass(frozen=True, kw_only=True)
class RecurrenceConfig(ChunkedConfig):
    """Configuration of both passes without the delta rule."""


PUBLIC_FIELDS = {
    "block_q": "chunk",
    "chunk_size": "chunk",
    "block_k": "output_block_k",
    "block_d": "output_block_v",
    "num_warps": "output_warps",
    "num_stages": "output_stages",
}
"""Maps fields of the public configurations to fields of this one."""


def heuristic(record: LinearRecurrence, device: DeviceInfo, direction: Direction) -> RecurrenceConfig:
    """Returns the default chunks and tiles for a record on a device, not measured."""
    default = RecurrenceConfig(**config_as_dict(make_chunked_config(record, device, 64)))
    # The chunks of a scan are sequential: with few scans, processing the chunks in parallel is faster.
    if not is_interpreting() and 4 * _num_scan_programs(record, default) < 3 * gpu_of(device).multiprocessors:
        return default
    return _fused_scan_config(record, device, default)


def config_as_dict(config: ChunkedConfig) -> dict[str, Any]:
    return {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}


def _num_scan_programs(record: LinearRecurrence, config: ChunkedConfig) -> int:
    """Returns the number of programs that compute states and outputs in one scan, for the default value tiles."""
    tiles = cdiv(record.value.shape[3], config.state_block_v)
    return record.query.shape[0] * num_sequences(record) * num_state_heads(record) * tiles * config.segments


def num_sequences(record: LinearRecurrence) -> int:
    return 1 if record.cu_seqlens is None else record.cu_seqlens.shape[0] - 1


def _fused_scan_config(
    record: LinearRecurrence, device: DeviceInfo, default_config: RecurrenceConfig
) -> RecurrenceConfig:
    """Returns the configuration of a fused scan of states and outputs; the default if the kernel does not fit."""
    if has_decay_per_channel(record):
        return default_config
    if is_interpreting():
        return default_config if record.cu_seqlens is None else dataclasses.replace(default_config, fused=True)
    if not fits_fused_scan(record, device):
        return default_config
    # One scan per multiprocessor: 3 stages 0.250 ms, 2 stages 0.335. Several scans: with 2 stages two are resident,
    # 0.634 ms for 65536 tokens instead of 0.724 with 3 stages; but packed sequences, where the longest decides, 0.340
    # and 0.301 (docs/lab/linear_recurrence_gpu.md).
    has_several_scans_per_sm = (
        record.cu_seqlens is None and _num_scan_programs(record, default_config) > gpu_of(device).multiprocessors
    )
    if record.dt is not None or record.skip is not None:
        # 1.07 ms instead of 1.59 for Mamba-2, though 8 bytes per thread spill; with gradients two kernels run instead.
        return dataclasses.replace(default_config, fused=True, fused_stages=2)
    # States are not stored, since they are most of the residuals of a call with gradients: 1.27 ms instead of 1.24.
    return dataclasses.replace(
        default_config, fused=True, fused_stages=2 if has_several_scans_per_sm else 3, keep_states=False
    )


def fits_fused_scan(record: LinearRecurrence, device: DeviceInfo) -> bool:
    """Returns whether a scan's state and tiles fit: float16's range is too small, and float32 needs twice the shared
    memory.
    """
    chip = gpu_of(device)  # only Hopper was measured
    is_not_bfloat16 = record.query.dtype.name != "bfloat16" or record.precision == lax.Precision.HIGHEST
    return (
        chip.architecture == "hopper"
        and not is_not_bfloat16
        and pad_to_power_of_two(record.query.shape[3], MIN_TILE) <= 128
    )


def candidates(record: LinearRecurrence, device: DeviceInfo, direction: Direction) -> tuple[RecurrenceConfig, ...]:
    """Returns configurations worth measuring for a record on a device."""
    default = heuristic(record, device, direction)
    if is_interpreting():
        other = dataclasses.replace(default, chunk=MIN_TILE, keep_states=False)
        fuse_scan = record.cu_seqlens is None and not has_decay_per_channel(record)
        return (
            default,
            dataclasses.replace(other, fused=fuse_scan),
            dataclasses.replace(other, fused=False, segments=1),
        )
    fused_config = _fused_scan_config(record, device, default)
    configs = [
        dataclasses.replace(default, fused=False),
        dataclasses.replace(default, fused=False, keep_states=False),
    ]
    if not has_decay_per_channel(record):
        configs += [dataclasses.replace(configs[0], chunk=2 * default.chunk, output_block_v=2 * default.output_block_v)]
    if fused_config.fused:
        configs += [dataclasses.replace(fused_config, fused_stages=n) for n in (2, 3)]
        configs += [dataclasses.replace(fused_config, fused_block_v=32, fused_stages=2)]
        # Segments of a row, which are scanned in parallel.
        configs += [
            dataclasses.replace(fused_config, segments=n)
            for n in (default.segments // 2, 2 * default.segments)
            if n > 1
        ]
    configs += [
        dataclasses.replace(x, gradient_block_k=n, gradient_stages=1)
        for x in (fused_config, *configs[:3])
        for n in (64, 32)
    ]
    configs += [dataclasses.replace(default, fused=False, state_block_k=32, segments=2 * default.segments)]
    return tuple(dict.fromkeys((default, *configs)))


def tuned_table_key(record: LinearRecurrence) -> str | None:
    """Returns the key of a shipped table entry, for calls with enough work for a large GPU without segments; else
    None.
    """
    rows, tokens, _, key_dim = record.query.shape
    if record.cu_seqlens is not None or tokens < 1024 or rows * num_state_heads(record) < 64:
        return None
    gate_kind = "no" if record.decay is None else "channel" if has_decay_per_channel(record) else "head"
    bits = 8 * record.query.dtype.itemsize  # bfloat16 and float16 have the same costs
    key_words = [
        f"{bits} bits",
        f"{pad_to_power_of_two(key_dim, MIN_TILE)}x{pad_to_power_of_two(record.value.shape[3], MIN_TILE)}",
        f"{gate_kind} gates",
    ]
    key_words += ["shared keys"] if _heads_share_keys(record) else []
    return " ".join(key_words if record.precision is None else [*key_words, str(record.precision)])


def make_chunked_config(record: LinearRecurrence, device: DeviceInfo, chunk: int) -> ChunkedConfig:
    """Returns the configuration for chunks of a length.

    Measured on an H200 with chunks of 64 and K, V of 128 (docs/lab/linear_recurrence_gpu.md): states 64 x 64, 4 warps
    and 3 stages 0.172 ms, 32 x 64 and 2 warps 0.189, 128 x 64 0.246; outputs 4 warps 0.220 ms, 8 warps 0.268, since
    64 rows are one warpgroup's; scores 64 channels 0.654 ms, 32 channels 0.866.

    Args:
        record: The canonical arguments.
        device: What it runs on.
        chunk: Tokens per chunk.
    """
    chip = gpu_of(device)
    is_float32 = record.query.dtype.itemsize > 2 or record.precision == lax.Precision.HIGHEST
    has_small_shared_memory = is_float32 or chip.shared_memory < 128 * 1024
    key_dim, value_dim = (pad_to_power_of_two(x.shape[3], MIN_TILE) for x in (record.query, record.value))
    max_block = 16 if is_interpreting() else 64
    half_block = 32 if has_small_shared_memory else max_block
    output_block_k = min(key_dim, half_block, max_block)
    state_block_k, state_block_v = min(key_dim, max_block), min(value_dim, max_block)
    output_block_v = 2 * max_block if has_decay_per_channel(record) and not has_small_shared_memory else max_block
    # register pressure of the pairs is too high for longer chunks
    needs_short_chunks = is_float32 or (chip.architecture == "ada" and has_decay_per_channel(record))
    chunk, backward_chunk = _chunk_sizes_of_passes(record, min(chunk, 32) if needs_short_chunks else chunk)
    num_warps = 8 if backward_chunk > 64 else 4
    is_hopper = chip.architecture == "hopper" and not is_float32
    gradient_block_k, gradient_warps = _gradient_tile_and_warps(record, num_warps, is_hopper)
    return ChunkedConfig(
        chunk=chunk,
        backward_chunk=backward_chunk,
        segments=_segments_per_row(record, chip.multiprocessors, chunk, state_block_k, state_block_v),
        keep_states=True,
        state_block_k=state_block_k,
        state_block_v=state_block_v,
        state_stages=2 if has_small_shared_memory else 3,
        score_block_k=min(output_block_k, 64 if chip.architecture in ("hopper", "blackwell") else 32),
        output_block_t=MIN_TILE if is_interpreting() else 64,
        output_block_k=output_block_k,
        output_block_v=min(value_dim, output_block_v),
        output_warps=num_warps,
        output_stages=1 if has_small_shared_memory else 2,
        gradient_block_k=min(output_block_k, gradient_block_k),
        gradient_block_v=min(value_dim, half_block, max_block),
        gradient_warps=gradient_warps,
        gradient_stages=1 if has_small_shared_memory or _needs_one_gradient_stage(record, is_hopper) else 2,
        fused=False,
        fused_block_v=min(value_dim, 64),
        fused_stages=2 if has_small_shared_memory else 3,
    )


def _chunk_sizes_of_passes(record: LinearRecurrence, chunk: int) -> tuple[int, int]:
    """Returns the tokens per chunk of the forward and of the backward pass, no more than a row needs."""
    if is_interpreting():
        return (MIN_TILE if has_decay_per_channel(record) else 2 * MIN_TILE), MIN_TILE
    chunk = max(MIN_TILE, min(chunk, pad_to_power_of_two(record.query.shape[1], MIN_TILE)))
    return chunk, chunk


def _needs_one_gradient_stage(record: LinearRecurrence, is_hopper: bool) -> bool:
    """Returns whether one stage is faster: with gates per key channel and 32 key channels 2.61 ms; but in the delta
    rule 3.890 instead of 3.811 with 2 stages.
    """
    return is_hopper and has_decay_per_channel(record) and record.beta is None


def _gradient_tile_and_warps(record: LinearRecurrence, num_warps: int, is_hopper: bool) -> tuple[int, int]:
    """Returns the key channels and warps of a program for gradients of queries and keys, as registers allow."""
    if has_decay_per_channel(record):
        # Each level of `midpoint_decay` adds to both gradients, which are float32 in registers. On Hopper 32 channels
        # take 2.61 ms instead of 3.30, and with the delta rule, where they spill 112 bytes per thread, 3.811 instead of
        # 4.716 (docs/lab/linear_recurrence_gpu.md). Sums over heads that share a query or key were not measured.
        num_heads = num_state_heads(record) if record.beta is None else 0
        return (16 if not is_hopper or num_heads > min(record.query.shape[2], record.key.shape[2]) else 32), 4
    # Without the delta rule, registers hold the sums over the heads that share a key.
    return (32, 4) if record.beta is None and _heads_share_keys(record) else (64, num_warps)


def _heads_share_keys(record: LinearRecurrence) -> bool:
    return num_state_heads(record) > record.key.shape[2]


def _segments_per_row(record: LinearRecurrence, multiprocessors: int, chunk: int, block_k: int, block_v: int) -> int:
    """Returns the segments per row: one if rows, heads and tiles of states give every multiprocessor a scan already."""
    if record.cu_seqlens is not None:
        return 1
    if is_interpreting():
        return 2
    rows, tokens, _, key_dim = record.query.shape
    num_tiles = cdiv(key_dim, block_k) * cdiv(record.value.shape[3], block_v)
    # A scan is sequential over its chunks, so fewer scans than multiprocessors leave some idle.
    num_scans = rows * num_state_heads(record) * num_tiles
    if num_scans >= multiprocessors:
        return 1
    # Segments cost a second scan over keys and values; none gets shorter than 16 chunks.
    return max(1, min(2 * multiprocessors // num_scans, tokens // (16 * chunk)))
