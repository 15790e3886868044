"""Backward pass of ring attention on Hopper, by the same loop as the forward pass."""

from typing import Any

import jax

from ejkernel.families.ring_attention import loop as ring_loop
from ejkernel.types.pullback import Pullback
from ejkernel_pallas.gpu.ring_attention.forward import RING_STEP_KERNEL


def backward(pullback: Pullback, config: Any) -> dict[str, jax.Array]:
    """Returns the gradients of the requested fields of one device's record, each in its field's shape and dtype."""
    return ring_loop.backward(pullback, config, RING_STEP_KERNEL)
