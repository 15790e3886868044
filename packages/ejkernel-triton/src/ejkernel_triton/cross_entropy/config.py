"""Configurations of the cross-entropy kernels."""

import dataclasses

from ejkernel.arithmetic import cdiv
from ejkernel.families.cross_entropy import FAMILY, CrossEntropy, vocabulary
from ejkernel.ops.device import DeviceInfo
from ejkernel.ops.params import Direction
from ejkernel.planning.fixed_sizes import with_fixed_sizes
from ejkernel_triton.launch import is_interpreting
from ejkernel_triton.sizes import pad_to_power_of_two, require_powers_of_two

BLOCK_LOGITS_BYTES = 2**30
"""Bytes of a block of logits, at most. For each block, the products read and write the sum of the matrix's gradient."""

TOKEN_MULTIPLE = 256
"""What the tokens of a block are a multiple of, if there are several blocks: products have such tiles."""

BYTES_PER_LOAD = 16

LOADS_PER_THREAD = 4
"""Loads of 16 bytes that a thread has in flight; measured on an H200 (docs/lab/cross_entropy_gpu.md)."""
MAX_WARPS = 4
"""The most warps of a program; measured on an H200 (docs/lab/cross_entropy_gpu.md)."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LossTiles:
    """Configuration of either pass.

    Attributes:
        block_t: Tokens of a block of logits, at most. Not read if the logits are given.
        block_v: Entries of the vocabulary that a program loads at a time; a power of two.
        num_warps: Warps per program.
        float32_logits: Whether blocks of logits are float32; else they have the inputs' dtype. Not read if the logits
            are given.
        float32_sums: Whether the gradient of the matrix is summed over blocks in float32; else in the inputs' dtype.
    """

    block_t: int
    block_v: int
    num_warps: int
    float32_logits: bool = False
    float32_sums: bool = True

    def __post_init__(self) -> None:
        require_powers_of_two(self, "block_v", "num_warps")
        if self.block_t < 1:
            raise ValueError(f"block_t: got {self.block_t}, wants at least 1")


PUBLIC_FIELDS = {"block_m": "block_t", "num_warps": "num_warps"}
"""Maps fields of the public configuration to fields of this one."""


def heuristic(record: CrossEntropy, device: DeviceInfo, direction: Direction) -> LossTiles:
    """Returns the default sizes for a record on a device."""
    tokens, entries, itemsize = record.inputs.shape[0], vocabulary(record), record.inputs.dtype.itemsize
    if is_interpreting():
        return LossTiles(block_t=min(tokens, 24), block_v=min(32, pad_to_power_of_two(entries)), num_warps=1)
    block_v, num_warps = tile_of_entries(entries, itemsize, device)
    return LossTiles(block_t=block_tokens(tokens, entries * itemsize), block_v=block_v, num_warps=num_warps)


def batch_invariant(record: CrossEntropy, device: DeviceInfo, direction: Direction) -> LossTiles:
    """Returns the sizes for all calls in a `batch_invariant` block."""
    return heuristic(with_fixed_sizes(record, FAMILY.axes_of(record), {"t": TOKEN_MULTIPLE}), device, direction)


def tile_of_entries(entries: int, itemsize: int, device: DeviceInfo) -> tuple[int, int]:
    """Returns the entries that a program loads at a time, and its warps."""
    warp_entries = LOADS_PER_THREAD * (64 if device.vendor == "amd" else 32) * BYTES_PER_LOAD // itemsize
    num_warps = max(1, min(MAX_WARPS, pad_to_power_of_two(entries) // warp_entries))
    return min(pad_to_power_of_two(entries), num_warps * warp_entries), num_warps


def block_tokens(tokens: int, token_bytes: int) -> int:
    """Returns the tokens of a block: equal shares, of at most `BLOCK_LOGITS_BYTES`."""
    most = max(BLOCK_LOGITS_BYTES // token_bytes // TOKEN_MULTIPLE, 1) * TOKEN_MULTIPLE
    blocks = cdiv(tokens, most)
    return tokens if blocks == 1 else cdiv(cdiv(tokens, blocks), TOKEN_MULTIPLE) * TOKEN_MULTIPLE


def candidates(record: CrossEntropy, device: DeviceInfo, direction: Direction) -> tuple[LossTiles, ...]:
    """Returns sizes worth measuring for a record on a device."""
    default = heuristic(record, device, direction)
    configs = [dataclasses.replace(default, num_warps=2 * default.num_warps)]
    configs += [dataclasses.replace(default, block_v=2 * default.block_v, num_warps=2 * default.num_warps)]
    if record.lm_head is not None:
        configs += [dataclasses.replace(default, block_t=max(1, default.block_t // 2))]
        configs += [dataclasses.replace(default, float32_logits=True), dataclasses.replace(default, float32_sums=False)]
    return tuple(dict.fromkeys((default, *configs)))
