"""Defines the argument record of collective matmul, and functions of the record alone."""

from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax

from ejkernel.types.arguments import arguments, static

Collective = Literal["all_gather", "reduce_scatter"]


@arguments
class CollectiveMatmul:
    """Canonical input of one call, as one device sees it. P devices, M rows, K contracted, N columns.

    Attributes:
        x: [M, K] floating, the device's rows to gather, or all rows of its contracted elements.
        y: [K, N], or [N, K] if `transpose_y`; same dtype as x.
        collective: `"all_gather"` for an output [P M, N] of the rows of all devices; `"reduce_scatter"` for an output
            [M / P, N], the device's rows of the sum over all devices.
        axis_name: Mesh axis of the P devices; None where one device has everything. Where no such axis is bound, as
            when a part of a call is measured by itself, P is 1.
        transpose_y: Whether the rows of y are columns of the product.
        collective_id: Of the barrier with which TPU kernels begin; kernels that may run at the same time differ in it.
        precision: Of the products; None for what `ejkernel.planning.precision` says.
    """

    x: jax.Array
    y: jax.Array
    collective: Collective = static()
    axis_name: str | None = static()
    transpose_y: bool = static()
    collective_id: int = static()
    precision: lax.Precision | None = static(default=None)


def accumulator(record: CollectiveMatmul) -> Any:
    """Returns the dtype of sums, also of those that travel: float32, or float64 for float64 x."""
    return jnp.promote_types(record.x.dtype, jnp.float32)


def columns(record: CollectiveMatmul) -> int:
    """Returns N, the number of columns of the product."""
    return record.y.shape[0 if record.transpose_y else 1]
