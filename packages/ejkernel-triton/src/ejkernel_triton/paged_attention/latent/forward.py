"""`mla_decode` on the paged kernels: a dense cache of latent vectors is a cache with one page a sequence.

The operation lowers to tiled attention, whose gradients it has; this forward pass leaves the residuals of that family,
so that any backward pass of it serves.
"""

import jax

from ejkernel.families.paged_attention.latent_pages import as_pages
from ejkernel.families.tiled_attention import SoftmaxResiduals, TiledAttention
from ejkernel_triton.paged_attention.config import PagedForward
from ejkernel_triton.paged_attention.forward import attend_pages


def forward(record: TiledAttention, config: PagedForward) -> tuple[jax.Array, SoftmaxResiduals]:
    """Returns output [B, 1, H, Dv] and residuals of a record that `mla_decode` made."""
    pages, rotary = as_pages(record)
    output, lse = attend_pages(pages, config, rotary)
    return output[:, None], SoftmaxResiduals(lse=lse[:, :, None])
