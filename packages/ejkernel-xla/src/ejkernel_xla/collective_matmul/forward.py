"""Collective matmul in XLA."""

import jax

from ejkernel.families.collective_matmul import CollectiveMatmul
from ejkernel_xla.collective_matmul.config import CollectiveSchedule
from ejkernel_xla.collective_matmul.kernels.products import gathered_product, scattered_product


def forward(record: CollectiveMatmul, config: CollectiveSchedule) -> tuple[jax.Array, tuple[()]]:
    """Returns the output of a record.

    Args:
        record: The canonical arguments.
        config: The schedule.

    Returns:
        [P M, N] or [M / P, N] in x's dtype. There are no residuals.
    """
    multiply = gathered_product if record.collective == "all_gather" else scattered_product
    return multiply(record, record.x, 1 if record.transpose_y else 0, config), ()
