"""`mla_decode` on the paged kernels: a dense cache of latent vectors is a cache with one page a sequence.

The operation lowers to tiled attention, whose gradients it has; this forward pass leaves the residuals of that family,
so that any backward pass of it serves.
"""

import jax

from ejkernel.families.paged_attention import PagedAttention
from ejkernel.families.paged_attention.latent_pages import as_pages
from ejkernel.families.tiled_attention import SoftmaxResiduals, TiledAttention
from ejkernel.ops.device import DeviceInfo
from ejkernel.ops.params import Direction
from ejkernel_triton.paged_attention import config as paged_config
from ejkernel_triton.paged_attention.config import PagedForward
from ejkernel_triton.paged_attention.forward import attend_pages


def forward(record: TiledAttention, config: PagedForward) -> tuple[jax.Array, SoftmaxResiduals]:
    """Output [B, 1, H, Dv] and residuals of a record that `mla_decode` made."""
    pages, rotary = as_pages(record)
    output, lse = attend_pages(pages, config, rotary)
    return output[:, None], SoftmaxResiduals(lse=lse[:, :, None])


def heuristic(record: TiledAttention, device: DeviceInfo, direction: Direction) -> PagedForward:
    """Tile sizes for a record on a device."""
    return paged_config.heuristic(_shapes(record), device, direction)


def candidates(record: TiledAttention, device: DeviceInfo, direction: Direction) -> tuple[PagedForward, ...]:
    """Tile sizes worth measuring for a record on a device."""
    return paged_config.candidates(_shapes(record), device, direction)


def too_large(record: TiledAttention, device: DeviceInfo) -> str:
    """Why the kernel cannot run for a record on a device; empty where it can."""
    return paged_config.too_large(_shapes(record), device)


def _shapes(record: TiledAttention) -> PagedAttention:
    return jax.eval_shape(lambda record: as_pages(record)[0], record)
