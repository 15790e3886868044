"""Configurations of the kernel over codes."""

import dataclasses

from ejkernel.arithmetic import cdiv
from ejkernel.families.paged_attention import PagedAttention
from ejkernel.families.paged_attention import pages as paged_cache
from ejkernel.ops.device import DeviceInfo
from ejkernel.ops.params import Direction
from ejkernel_triton.launch import is_interpreting
from ejkernel_triton.sizes import pad_to_power_of_two, require_powers_of_two

PROGRAMS_PER_MULTIPROCESSOR = 4
"""Programs that a multiprocessor should have, so that its units wait for no single one."""

DEFAULT_MULTIPROCESSORS = 132
"""Those of an H200, for which the number of splits is chosen."""

MAX_COLUMNS_OF_THREE_STAGES = 256
"""Columns of 16-bit queries up to which three stages leave shared memory for three programs."""

KEYS_PER_WARP = 8
"""Keys of a tile that each warp needs: with 16 keys and 4 warps outputs on an H200 are twice as large (Triton 3.6)."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class CodeSplits:
    """Configuration of the kernel.

    Attributes:
        block_kv: Keys per tile; a power of two, at least 8 per warp.
        num_splits: Programs that share the keys of a row and a KV head.
        num_warps: Warps per program.
        num_stages: Software pipeline depth.
    """

    block_kv: int
    num_splits: int
    num_warps: int
    num_stages: int

    def __post_init__(self) -> None:
        require_powers_of_two(self, "block_kv", "num_splits", "num_warps")
        if self.block_kv < KEYS_PER_WARP * self.num_warps:
            raise ValueError(
                f"block_kv: got {self.block_kv} with num_warps {self.num_warps}; want at least {KEYS_PER_WARP} per warp"
            )


PUBLIC_FIELDS = {"kv_blocksize": "block_kv", "num_warps": "num_warps", "num_stages": "num_stages"}
"""Maps fields of the public configuration to fields of this one."""


def heuristic(record: PagedAttention, device: DeviceInfo, direction: Direction) -> CodeSplits:
    """Returns the default configuration for a record on a device, not measured."""
    is_wide = record.query.dtype.itemsize > 2 or record.query.shape[-1] > MAX_COLUMNS_OF_THREE_STAGES
    block_kv, warps = (16, 2) if is_interpreting() else (32, 4)
    # A multiprocessor of AMD has 64 KB, which one stage of a tile fits into.
    stages = 1 if device.vendor == "amd" else 2 if is_wide else 3
    programs = max(1, record.query.shape[0] * paged_cache.kv_heads(record))
    wanted = PROGRAMS_PER_MULTIPROCESSOR * DEFAULT_MULTIPROCESSORS
    tiles = cdiv(paged_cache.max_sequence_len(record), block_kv)
    splits = 2 if is_interpreting() else max(1, min(pad_to_power_of_two(cdiv(wanted, programs)), tiles))
    return CodeSplits(block_kv=block_kv, num_splits=pad_to_power_of_two(splits), num_warps=warps, num_stages=stages)


def candidates(record: PagedAttention, device: DeviceInfo, direction: Direction) -> tuple[CodeSplits, ...]:
    """Returns configurations worth measuring for a record on a device."""
    default = heuristic(record, device, direction)
    if is_interpreting():
        return (default, dataclasses.replace(default, num_splits=1))
    changes = (
        {"block_kv": 64, "num_warps": 8},
        {"block_kv": 16, "num_warps": 2},
        {"num_warps": 2},
        {"num_stages": 2},
    )
    splits = tuple({"num_splits": n} for n in (2 * default.num_splits, max(1, default.num_splits // 2)))
    made = (dataclasses.replace(default, **change) for change in ({}, *changes, *splits))
    return tuple(dict.fromkeys(made))
