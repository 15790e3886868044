"""Forward pass of ring attention on Hopper: the loop of `ejkernel.families.ring_attention.loop` over tiled attention.

    XLA           send and receive the keys of step n + 1
    Mosaic GPU    tiled attention on the keys of step n        gpu/tiled_attention/{forward,backward}.py

Kernels access no other device's memory: a step is a record of tiled attention, and steps are merged by their lse.
"""

from typing import Any

import jax

from ejkernel.families.ring_attention import RingAttention
from ejkernel.families.ring_attention import loop as ring_loop
from ejkernel.families.tiled_attention import SoftmaxResiduals
from ejkernel_pallas.gpu.tiled_attention import backward as tiled_backward
from ejkernel_pallas.gpu.tiled_attention import forward as tiled_forward

RING_STEP_KERNEL = ring_loop.StepKernel(tiled_forward.forward, tiled_backward.backward)


def forward(record: RingAttention, config: Any) -> tuple[jax.Array, SoftmaxResiduals]:
    """Returns attention output and residuals of one device's queries, [B, T, H, Dv] in the query's dtype."""
    return ring_loop.forward(record, config, RING_STEP_KERNEL)
