"""Tile sizes: those of paged attention, for the paged record of a dense latent cache."""

from typing import Any

from ejkernel.families.tiled_attention import TiledAttention
from ejkernel.ops.params import Direction
from ejkernel_pallas.tpu.latent_attention.plan import paged_record_shapes
from ejkernel_pallas.tpu.paged_attention import config as paged_config
from ejkernel_pallas.tpu.paged_attention.config import PUBLIC_FIELDS, TpuPaged

__all__ = ["PUBLIC_FIELDS", "TpuPaged", "candidates", "heuristic"]


def heuristic(record: TiledAttention, device: Any, direction: Direction) -> TpuPaged:
    """Returns tile sizes for a record on a device."""
    return paged_config.heuristic(paged_record_shapes(record), device, direction)


def candidates(record: TiledAttention, device: Any, direction: Direction) -> tuple[TpuPaged, ...]:
    """Returns tile sizes worth measuring for a record on a device."""
    return paged_config.candidates(paged_record_shapes(record), device, direction)
