"""Configurations of the causal convolution's kernels."""

import dataclasses
from typing import Any

from ejkernel.arithmetic import cdiv
from ejkernel.families.causal_convolution import FAMILY, CausalConvolution
from ejkernel.ops.chips import gpu_of
from ejkernel.ops.device import DeviceInfo
from ejkernel.ops.params import Direction
from ejkernel.planning.fixed_sizes import with_fixed_sizes
from ejkernel_triton.launch import is_interpreting


@dataclasses.dataclass(frozen=True, kw_only=True)
class ConvolutionForward:
    """Configuration of the forward kernel.

    Attributes:
        block_t: Tokens per program.
        block_c: Channels per program.
        num_warps: Warps per program.
    """

    block_t: int
    block_c: int
    num_warps: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class ConvolutionBackward:
    """Configuration of the backward kernel.

    Attributes:
        block_t: Tokens per block; the rows of the next blocks are loaded while one is computed.
        block_c: Channels per program.
        blocks_per_program: Blocks per program, over which it adds up the gradients of the weights.
        num_warps: Warps per program.
        num_stages: Pipeline stages: blocks in flight, and the one that is computed.
    """

    block_t: int
    block_c: int
    blocks_per_program: int
    num_warps: int
    num_stages: int


MIN_PROGRAMS_PER_SM_TO_ADD_BLOCKS = 7
"""Programs per multiprocessor, of eight that fit, from which on the backward pass is faster with more blocks per
program.
"""

PUBLIC_FIELDS = {"block_t": "block_t", "block_c": "block_c", "num_warps": "num_warps"}
"""Maps fields of the public configuration to fields of this one."""


def heuristic(
    record: CausalConvolution, device: DeviceInfo, direction: Direction
) -> ConvolutionForward | ConvolutionBackward:
    """Returns the default tiles for a record on a device: a thread has four neighbouring channels, two of float32."""
    max_channels = 1 << (record.x.shape[2] - 1).bit_length()
    warp_size = 64 if device.vendor == "amd" else 32
    # Measured on an H200 (docs/lab/selective_scan_gpu.md): forward 256 channels, 2 warps and 16 tokens 0.146 ms, 512
    # channels and 4 warps 0.149, blocks of 32 tokens 0.178; see there for backward.
    warps = 2 if max_channels >= 8 * warp_size else 1
    channels_per_thread = 2 if record.x.dtype.itemsize > 2 else 4
    block_c = max(16, min(max_channels, channels_per_thread * warp_size * warps))
    tokens = record.x.shape[1]
    if direction == "backward":
        block_t, blocks_per_program = _clamp_block_tokens(tokens, 4), 2 if is_interpreting() else 128
        programs = record.x.shape[0] * cdiv(record.x.shape[2], block_c)
        # More blocks per program read fewer halos and have fewer partial sums, if enough programs remain.
        while (
            blocks_per_program > 4
            and programs * cdiv(tokens, block_t * blocks_per_program)
            < MIN_PROGRAMS_PER_SM_TO_ADD_BLOCKS * gpu_of(device).multiprocessors
        ):
            blocks_per_program //= 2
        return ConvolutionBackward(
            block_t=block_t, block_c=block_c, blocks_per_program=blocks_per_program, num_warps=warps, num_stages=4
        )
    return ConvolutionForward(
        block_t=8 if is_interpreting() else _clamp_block_tokens(tokens, 16), block_c=block_c, num_warps=warps
    )


FIXED_TOKENS = 4096
"""Tokens of the call whose configuration serves all calls in a `batch_invariant` block."""


def batch_invariant(
    record: CausalConvolution, device: DeviceInfo, direction: Direction
) -> ConvolutionForward | ConvolutionBackward:
    """Returns the tiles for all calls in a `batch_invariant` block."""
    return heuristic(with_fixed_sizes(record, FAMILY.axes_of(record), {"t": FIXED_TOKENS}), device, direction)


def candidates(
    record: CausalConvolution, device: DeviceInfo, direction: Direction
) -> tuple[ConvolutionForward | ConvolutionBackward, ...]:
    """Returns tiles worth measuring for a record on a device."""
    default = heuristic(record, device, direction)
    sizes = [(default.block_c, default.num_warps), (2 * default.block_c, default.num_warps), (default.block_c // 2, 2)]
    tile_fields = [
        {"block_c": max(16, c), "num_warps": warps, "block_t": t}
        for c, warps in sizes
        for t in (default.block_t, 2 * default.block_t)
    ]
    configs: list[Any] = [dataclasses.replace(default, **shape) for shape in tile_fields]
    if isinstance(default, ConvolutionBackward):
        configs += [dataclasses.replace(x, blocks_per_program=2 * x.blocks_per_program) for x in (default, configs[1])]
        configs += [
            dataclasses.replace(x, blocks_per_program=max(1, x.blocks_per_program // 2)) for x in (default, configs[1])
        ]
        configs += [dataclasses.replace(default, num_stages=n) for n in (2, 3)]
    return tuple(dict.fromkeys((default, *configs)))


def _clamp_block_tokens(tokens: int, max_tokens: int) -> int:
    """Returns the tokens of a block: at most the number of tokens."""
    return min(max_tokens, 1 << (tokens - 1).bit_length())
