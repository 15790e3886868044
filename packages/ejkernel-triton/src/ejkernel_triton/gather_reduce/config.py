"""Configurations of the gather-reduce kernels."""

import dataclasses

from ejkernel.families.gather_reduce import FAMILY, GatherReduce
from ejkernel.ops.device import DeviceInfo
from ejkernel.ops.params import Direction
from ejkernel.planning.fixed_sizes import with_fixed_sizes
from ejkernel_triton.launch import is_interpreting
from ejkernel_triton.sizes import pad_to_power_of_two, require_powers_of_two

LOADS_IN_FLIGHT_PER_THREAD = 4
"""Loads in flight per thread, of 16 bytes each; the fastest of 1 to 8 on an H200."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class GatherTiles:
    """Configuration of a kernel.

    Attributes:
        block_t: Sums per program: tokens forward, rows backward; a power of two.
        block_d: Channels per program; a power of two.
        num_warps: Warps per program.
        scatter: Whether each row is read once and written to all of its tokens; a forward program then has rows.
    """

    block_t: int
    block_d: int
    num_warps: int
    scatter: bool = False

    def __post_init__(self) -> None:
        require_powers_of_two(self, "block_t", "block_d", "num_warps")


PUBLIC_FIELDS = {"block_t": "block_t", "block_d": "block_d", "num_warps": "num_warps"}
"""Maps fields of the public configuration to fields of this one."""


def heuristic(record: GatherReduce, device: DeviceInfo, direction: Direction) -> GatherTiles:
    """Returns the default tiles for a record on a device: a thread has 16 bytes of each row that it loads."""
    num_sums, num_terms = record.indices.shape if direction == "forward" else record.inverse.shape
    warp_size, elements_per_load = 64 if device.vendor == "amd" else 32, 16 // record.rows.dtype.itemsize
    channels = pad_to_power_of_two(record.rows.shape[1])
    scatter = direction == "forward" and is_row_copy(record)
    if is_interpreting():
        return GatherTiles(
            block_t=min(8, pad_to_power_of_two(num_sums)), block_d=min(64, channels), num_warps=1, scatter=scatter
        )
    num_warps = max(1, min(4, channels // (warp_size * elements_per_load)))
    # Every row is read once: 0.090 ms instead of 0.118 (docs/lab/grouped_matmul_gpu.md).
    block_t = (
        1
        if scatter
        else min(pad_to_power_of_two(num_sums), max(1, LOADS_IN_FLIGHT_PER_THREAD // pad_to_power_of_two(num_terms)))
    )
    return GatherTiles(
        block_t=block_t,
        block_d=max(16, min(channels, num_warps * warp_size * elements_per_load)),
        num_warps=num_warps,
        scatter=scatter,
    )


FIXED_ROWS = 4096
"""Tokens and rows of the call whose configuration serves all calls in a `batch_invariant` block."""


def batch_invariant(record: GatherReduce, device: DeviceInfo, direction: Direction) -> GatherTiles:
    """Returns the tiles for all calls in a `batch_invariant` block."""
    return heuristic(
        with_fixed_sizes(record, FAMILY.axes_of(record), {"t": FIXED_ROWS, "m": FIXED_ROWS}), device, direction
    )


def is_row_copy(record: GatherReduce) -> bool:
    """Returns whether every token is a copy of a row, with several tokens per row: the dispatch of a mixture of
    experts.
    """
    return record.weights is None and record.indices.shape[1] == 1 and record.inverse.shape[1] > 1


def candidates(record: GatherReduce, device: DeviceInfo, direction: Direction) -> tuple[GatherTiles, ...]:
    """Returns tiles worth measuring for a record on a device."""
    default = heuristic(record, device, direction)
    gather_config = dataclasses.replace(default, scatter=False)
    configs = [dataclasses.replace(default, block_t=2)] if default.scatter else []
    configs += [dataclasses.replace(gather_config, block_t=n) for n in (2, 1, 4, 8)]
    configs += [
        dataclasses.replace(gather_config, block_d=2 * default.block_d, num_warps=n) for n in (default.num_warps, 8)
    ]
    configs += [dataclasses.replace(gather_config, block_t=max(1, default.block_t // 2), block_d=2 * default.block_d)]
    return tuple(dict.fromkeys((default, *configs[: 2 if is_interpreting() else None])))
