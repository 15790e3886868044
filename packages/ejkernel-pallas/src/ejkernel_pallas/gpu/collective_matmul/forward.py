"""Collective matmul on Hopper."""

import jax

from ejkernel.families.collective_matmul import CollectiveMatmul
from ejkernel_pallas.gpu.collective_matmul.config import HopperCollective
from ejkernel_pallas.gpu.collective_matmul.kernels.launch import gather_and_multiply, multiply_and_scatter
from ejkernel_pallas.gpu.collective_matmul.spec import make_spec


def forward(record: CollectiveMatmul, params: HopperCollective) -> tuple[jax.Array, tuple[()]]:
    """Returns the output of a record.

    Args:
        record: The canonical arguments.
        params: Tile sizes and stages.

    Raises:
        ValueError: A size is not valid for the kernels.

    Returns:
        [P M, N] or [M / P, N] in x's dtype. There are no residuals.
    """
    gathers = record.collective == "all_gather"
    spec = make_spec(record, params, record.x, 1 if record.transpose_y else 0, gathers=gathers)
    if gathers:
        return gather_and_multiply(spec, record.x, record.y, keeps_rows=False)[0], ()
    return multiply_and_scatter(spec, record.x, record.y), ()
