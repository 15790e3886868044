"""Backward pass of ring attention on TPUs."""

import dataclasses

import jax

from ejkernel.types.pullback import Pullback
from ejkernel_pallas.tpu.ring_attention.kernels import collective_backward, remote_backward
from ejkernel_pallas.tpu.ring_attention.plan import uses_remote_copies, with_window_of_function
from ejkernel_pallas.tpu.tiled_attention.config import TpuBackward


def backward(pullback: Pullback, config: TpuBackward) -> dict[str, jax.Array]:
    """Returns gradients of the requested fields of one device's record.

    Args:
        pullback: Record, residuals, output and its cotangent, and the names of the requested fields.
        config: As for tiled attention.

    Returns:
        The gradient of each requested field, in its shape and dtype.
    """
    pullback = dataclasses.replace(pullback, record=with_window_of_function(pullback.record))
    kernel = remote_backward if uses_remote_copies(pullback.record) else collective_backward
    return kernel.backward(pullback, config)
