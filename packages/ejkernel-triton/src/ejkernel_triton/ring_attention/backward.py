"""Backward pass of ring attention in Triton."""

from typing import Any

import jax

from ejkernel.families.ring_attention import loop as ring_loop
from ejkernel.types.pullback import Pullback
from ejkernel_triton.ring_attention.plan import TILED_ATTENTION_KERNEL


def backward(pullback: Pullback, params: Any) -> dict[str, jax.Array]:
    """Returns the gradients of the requested fields of one device's record, each in its field's shape and dtype."""
    return ring_loop.backward(pullback, params, TILED_ATTENTION_KERNEL)
