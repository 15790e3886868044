"""`mla_decode` on the paged kernel: a dense cache of latent vectors is one whose pages follow each other.

The operation lowers to tiled attention, whose gradients it has; this forward pass leaves the residuals of that family,
so that any backward pass of it serves.
"""

import jax

from ejkernel.families.tiled_attention import SoftmaxResiduals, TiledAttention
from ejkernel_pallas.tpu.latent_attention.config import TpuPaged
from ejkernel_pallas.tpu.latent_attention.plan import as_pages
from ejkernel_pallas.tpu.paged_attention.forward import forward as paged_forward


def forward(record: TiledAttention, config: TpuPaged) -> tuple[jax.Array, SoftmaxResiduals]:
    """Returns output [B, 1, H, Dv] and residuals of a record that `mla_decode` made."""
    (output, lse), _ = paged_forward(as_pages(record), config)
    return output[:, None], SoftmaxResiduals(lse=lse[:, :, None])
