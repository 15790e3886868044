"""`mla_decode` on the paged kernel: a dense cache of latent vectors is a paged cache with consecutive pages.

The operation lowers to tiled attention, whose gradients it has; this forward pass returns that family's residuals, so
that any of its backward passes can follow.
"""

import jax

from ejkernel.families.tiled_attention import SoftmaxResiduals, TiledAttention
from ejkernel_pallas.tpu.latent_attention.config import TpuPaged
from ejkernel_pallas.tpu.latent_attention.plan import paged_record_of_dense_cache
from ejkernel_pallas.tpu.paged_attention.forward import forward as paged_forward


def forward(record: TiledAttention, config: TpuPaged) -> tuple[jax.Array, SoftmaxResiduals]:
    """Returns output [B, 1, H, Dv] and residuals of a record of `mla_decode`."""
    (output, lse), _ = paged_forward(paged_record_of_dense_cache(record), config)
    return output[:, None], SoftmaxResiduals(lse=lse[:, :, None])
