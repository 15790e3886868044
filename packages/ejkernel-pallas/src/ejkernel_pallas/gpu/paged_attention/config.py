"""Configuration of the paged kernels: its type, the heuristic, and the candidates."""

import dataclasses
from typing import Any

from ejkernel.ops.device import DeviceInfo
from ejkernel.ops.params import Direction


@dataclasses.dataclass(frozen=True, kw_only=True)
class HopperPaged:
    """Configuration of the paged kernel.

    Attributes:
        num_programs: Persistent thread blocks that share the key blocks of a call.
        stages: Blocks of 128 keys and their values in shared memory, at most as many as fit.
        lazy_rescaling: Whether warps in which no row's maximum moved skip rescaling the accumulator.
        prefill_tokens: The number of query tokens from which on flash attention's kernel serves a sequence.
    """

    num_programs: int
    stages: int = 4
    lazy_rescaling: bool = True
    prefill_tokens: int = 32


PUBLIC_FIELDS = {"num_stages": "stages"}
"""Maps fields of the public configurations to fields of this one."""


def heuristic(record: Any, device: DeviceInfo, direction: Direction) -> HopperPaged:
    """Returns one program per multiprocessor."""
    from ejkernel_pallas.gpu.hopper.tile_scheduler import num_multiprocessors

    return HopperPaged(num_programs=num_multiprocessors())


def candidates(record: Any, device: DeviceInfo, direction: Direction) -> tuple[HopperPaged, ...]:
    """Returns candidates: fewer stages, and rescaling always."""
    default = heuristic(record, device, direction)
    return default, dataclasses.replace(default, stages=2), dataclasses.replace(default, lazy_rescaling=False)
