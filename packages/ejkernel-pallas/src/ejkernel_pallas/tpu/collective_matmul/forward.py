"""Collective matmul on TPUs."""

import jax

from ejkernel.families.collective_matmul import CollectiveMatmul
from ejkernel.families.ring_attention import axis_size
from ejkernel_pallas.tpu.collective_matmul.config import TpuCollective
from ejkernel_pallas.tpu.collective_matmul.kernels.gather_matmul import gather_matmul
from ejkernel_pallas.tpu.collective_matmul.kernels.scatter_matmul import scatter_matmul
from ejkernel_pallas.tpu.collective_matmul.spec import make_spec, multiply_on_one_device


def forward(record: CollectiveMatmul, config: TpuCollective) -> tuple[jax.Array, tuple[()]]:
    """Returns the output of a record.

    Args:
        record: The canonical arguments.
        config: Tiles.

    Returns:
        [P M, N] or [M / P, N] in x's dtype. There are no residuals.
    """
    y_axis = 1 if record.transpose_y else 0
    if axis_size(record.axis_name) == 1:
        return multiply_on_one_device(record, record.x, record.y, (1, y_axis)).astype(record.x.dtype), ()
    kernel = gather_matmul if record.collective == "all_gather" else scatter_matmul
    return kernel(record.x, record.y, y_axis, make_spec(record, config)), ()
