"""`mla_decode` on the paged kernels: a dense cache of latent vectors is a paged cache with one page per sequence.

The operation lowers to tiled attention, whose gradients it has; this forward pass returns that family's residuals, so
that any of its backward passes can follow.
"""

import jax

from ejkernel.families.paged_attention.latent_pages import as_paged_record
from ejkernel.families.tiled_attention import SoftmaxResiduals, TiledAttention
from ejkernel_triton.paged_attention.config import PagedForward
from ejkernel_triton.paged_attention.forward import attend_pages


def forward(record: TiledAttention, config: PagedForward) -> tuple[jax.Array, SoftmaxResiduals]:
    """Returns output [B, 1, H, Dv] and residuals of a record of `mla_decode`."""
    pages, rotary = as_paged_record(record)
    output, lse = attend_pages(pages, config, rotary)
    return output[:, None], SoftmaxResiduals(lse=lse[:, :, None])
