"""The kernel of each ring step: tiled attention's, in both passes."""

from ejkernel.families.ring_attention import loop as ring_loop
from ejkernel_triton.tiled_attention import backward as tiled_backward
from ejkernel_triton.tiled_attention import forward as tiled_forward

TILED_ATTENTION_KERNEL = ring_loop.StepKernel(tiled_forward.forward, tiled_backward.backward)
