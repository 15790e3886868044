"""Ring attention in Mosaic GPU: the loop of `ejkernel.families.ring_attention.loop`, each step one tiled attention
kernel.

    XLA           send and receive the keys of step n + 1
    Mosaic GPU    tiled attention on the keys of step n        gpu/tiled_attention/{forward,backward}

A kernel reads no other device's memory: a step is a record of tiled attention, and steps are merged by their lse.
"""

from typing import Any

import jax

from ejkernel.families.ring_attention import RingAttention
from ejkernel.families.ring_attention import loop as ring_loop
from ejkernel.families.tiled_attention import SoftmaxResiduals
from ejkernel.types.pullback import Pullback
from ejkernel_pallas.gpu.tiled_attention.backward import run as tiled_backward
from ejkernel_pallas.gpu.tiled_attention.forward import run as tiled_forward

KERNEL = ring_loop.StepKernel(tiled_forward.forward, tiled_backward.backward)


def forward(record: RingAttention, params: Any) -> tuple[jax.Array, SoftmaxResiduals]:
    """Attention output and residuals of one device's queries, [B, T, H, Dv] in the query's dtype."""
    return ring_loop.forward(record, params, KERNEL)


def backward(pullback: Pullback, params: Any) -> dict[str, jax.Array]:
    """Gradients of the wanted fields of one device's record, each in its field's shape and dtype."""
    return ring_loop.backward(pullback, params, KERNEL)
