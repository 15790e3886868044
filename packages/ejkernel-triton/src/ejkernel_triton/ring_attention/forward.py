"""Forward pass of ring attention in Triton: the ring loop with a tiled attention kernel in each step."""

from typing import Any

import jax

from ejkernel.families.ring_attention import RingAttention
from ejkernel.families.ring_attention import loop as ring_loop
from ejkernel.families.tiled_attention import SoftmaxResiduals
from ejkernel_triton.ring_attention.plan import TILED_ATTENTION_KERNEL


def forward(record: RingAttention, params: Any) -> tuple[jax.Array, SoftmaxResiduals]:
    """Returns attention output and residuals of one device's queries, [B, T, H, Dv] in the query's dtype."""
    return ring_loop.forward(record, params, TILED_ATTENTION_KERNEL)
