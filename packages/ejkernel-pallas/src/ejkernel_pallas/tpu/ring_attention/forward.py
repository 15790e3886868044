"""Forward pass of ring attention on TPUs."""

import jax

from ejkernel.families.ring_attention import RingAttention
from ejkernel.families.tiled_attention import SoftmaxResiduals
from ejkernel_pallas.tpu.ring_attention.kernels import collective_forward, remote_forward
from ejkernel_pallas.tpu.ring_attention.plan import uses_remote_copies, with_window_of_function
from ejkernel_pallas.tpu.tiled_attention.config import TpuForward


def forward(record: RingAttention, config: TpuForward) -> tuple[jax.Array, SoftmaxResiduals]:
    """Returns attention output and residuals of one device's queries.

    Args:
        record: The canonical arguments.
        config: As for tiled attention.

    Returns:
        Output [B, T, H, Dv] in the query's dtype, and the residuals for the backward pass.
    """
    record = with_window_of_function(record)
    kernel = remote_forward if uses_remote_copies(record) else collective_forward
    return kernel.forward(record, config)
