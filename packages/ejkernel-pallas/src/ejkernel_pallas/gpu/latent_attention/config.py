"""Configuration of the latent kernel: its type, the heuristic, and the candidates."""

import dataclasses
from typing import Any

from ejkernel.ops.device import DeviceInfo
from ejkernel.ops.params import Direction
from ejkernel_pallas.gpu.hopper.sizes import ROWS_PER_WARP, WGMMA_M


@dataclasses.dataclass(frozen=True, kw_only=True)
class HopperLatent:
    """Configuration of the latent kernel.

    Attributes:
        num_programs: Thread blocks over which the key blocks of a call are distributed (split-KV).
        lazy_rescaling: Whether a row's maximum moves only if scores exceed it by `spec.RESCALE_THRESHOLD`.
        store_padding: Whether the padding rows of a tile of fewer than 64 heads are stored and merged. False saves 16
            heads three quarters of the traffic of partial results.
        max_growth_percent: Percent by which a program's share of the key blocks may grow so that no item is split:
            partial results are stored in float32 and merged, which whole items are not.
    """

    num_programs: int
    lazy_rescaling: bool = True
    store_padding: bool = True
    max_growth_percent: int = 6


PUBLIC_FIELDS: dict[str, str] = {}
"""Maps fields of the public configurations to fields of this one: none."""


def heuristic(record: Any, device: DeviceInfo, direction: Direction) -> HopperLatent:
    """Returns one program per multiprocessor."""
    from ejkernel_pallas.gpu.hopper.tile_scheduler import num_multiprocessors

    # Measured on an H200, 16 heads, B128 ctx 4096: 0.165 ms without the padding rows, 0.182 with them.
    return HopperLatent(
        num_programs=num_multiprocessors(), store_padding=record.query.shape[-2] > WGMMA_M - ROWS_PER_WARP
    )


def candidates(record: Any, device: DeviceInfo, direction: Direction) -> tuple[HopperLatent, ...]:
    """Returns candidates: rescaling, equal shares, padding rows; shared memory holds only one program."""
    default = heuristic(record, device, direction)
    heads = record.query.shape[-2]
    equal_steps = dataclasses.replace(default, max_growth_percent=0)
    padded_candidates = (dataclasses.replace(default, store_padding=True),) if heads <= WGMMA_M - ROWS_PER_WARP else ()
    return default, dataclasses.replace(default, lazy_rescaling=False), equal_steps, *padded_candidates
