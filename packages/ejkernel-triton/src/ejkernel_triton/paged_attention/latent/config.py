"""Tile sizes of the paged kernels for a dense cache of latent vectors, which has one page per sequence."""

import jax

from ejkernel.families.paged_attention import PagedAttention
from ejkernel.families.paged_attention.latent_pages import as_paged_record
from ejkernel.families.tiled_attention import TiledAttention
from ejkernel.ops.device import DeviceInfo
from ejkernel.ops.params import Direction
from ejkernel_triton.paged_attention import config as paged_config
from ejkernel_triton.paged_attention.config import PagedForward


def heuristic(record: TiledAttention, device: DeviceInfo, direction: Direction) -> PagedForward:
    """Returns tile sizes for a record on a device."""
    return paged_config.heuristic(_paged_record_of_shapes(record), device, direction)


def candidates(record: TiledAttention, device: DeviceInfo, direction: Direction) -> tuple[PagedForward, ...]:
    """Returns tile sizes worth measuring for a record on a device."""
    return paged_config.candidates(_paged_record_of_shapes(record), device, direction)


def shared_memory_refusal(record: TiledAttention, device: DeviceInfo) -> str:
    """Returns why the kernel cannot run for a record on a device; empty where it can."""
    return paged_config.shared_memory_refusal(_paged_record_of_shapes(record), device)


def _paged_record_of_shapes(record: TiledAttention) -> PagedAttention:
    return jax.eval_shape(lambda record: as_paged_record(record)[0], record)
