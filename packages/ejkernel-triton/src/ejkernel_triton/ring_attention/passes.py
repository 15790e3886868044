"""Ring attention in Triton: the loop of `families.ring_attention.loop`, each step one tiled attention kernel."""

from typing import Any

import jax

from ejkernel.families.ring_attention import RingAttention
from ejkernel.families.ring_attention import loop as ring_loop
from ejkernel.families.tiled_attention import SoftmaxResiduals
from ejkernel.types.pullback import Pullback
from ejkernel_triton.tiled_attention import backward as tiled_backward
from ejkernel_triton.tiled_attention import forward as tiled_forward

KERNEL = ring_loop.StepKernel(tiled_forward.forward, tiled_backward.backward)


def forward(record: RingAttention, params: Any) -> tuple[jax.Array, SoftmaxResiduals]:
    """Attention output and residuals of one device's queries, [B, T, H, Dv] in the query's dtype."""
    return ring_loop.forward(record, params, KERNEL)


def backward(pullback: Pullback, params: Any) -> dict[str, jax.Array]:
    """Gradients of the wanted fields of one device's record, each in its field's shape and dtype."""
    return ring_loop.backward(pullback, params, KERNEL)
