"""Reduce-scatter matmul: this device's rows of a product whose contracted elements are spread over devices."""

from typing import Any

import jax
from jax import lax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float

from ejkernel.families import collective_matmul as family
from ejkernel.families.collective_matmul import CollectiveMatmul
from ejkernel.modules.operations.cases import collective_matmul as cases
from ejkernel.modules.operations.configs import ReduceScatterMatmulConfig
from ejkernel.modules.operations.shared.collective_products import (
    canonical_fields,
    check_matrices,
    lower_to_record,
    placement,
)
from ejkernel.modules.operations.shared.paged_arguments import set_canonical_fields
from ejkernel.ops.argument_records import ArgumentRecord
from ejkernel.ops.execution.kernel import Kernel
from ejkernel.ops.model import Op, tolerances
from ejkernel.ops.operation import document_options, run_operation


@document_options
def reduce_scatter_matmul(
    x: Float[Array, "m k"],
    y: Float[Array, "n k"],
    axis_name: str | None,
    *,
    collective_id: int = 0,
    precision: lax.PrecisionLike = None,
    tp_size: int | None = None,
    platform: str | None = None,
    cfg: ReduceScatterMatmulConfig | None = None,
    mesh: jax.sharding.Mesh | None = None,
    in_specs: Any = None,
    out_specs: Any = None,
) -> Float[Array, "s n"]:
    """Returns this device's rows of the sum over a mesh axis of `x @ y.T`: `reduce_scatter(x @ y.T)`.

    The last product of a tensor-parallel layer whose activations are split by tokens. While the sums of other devices'
    rows travel, each device computes the product that it adds to the next (Wang et al. 2023, ASPLOS). Sums travel in
    float32 and are rounded once. The gradient of x is an `all_gather_matmul`, and that of y overlaps the same
    transfers.

    Shape letters: P devices along the axis, M rows, K contracted elements of one device, N columns.

    Where `axis_name` is bound, as in a function under `jax.shard_map`, arrays are the calling device's. With `mesh`, or
    a mesh set by `jax.set_mesh`, they are those of the whole call, the contracted elements of both split. With
    `axis_name=None`, one device has everything.

    Args:
        x: [M, K] float16, bfloat16, float32 or float64; M is a multiple of P. Differentiable.
        y: [N, K], dtype of x. Differentiable.
        axis_name: The mesh axis.
        collective_id: Number of the barrier with which TPU kernels begin. Kernels of different calls that may run at
            the same time must differ in it; no other backend reads it.
        precision: `jax.lax.Precision`, or its name, of the matrix products. None takes all digits of float32 and wider
            inputs, unless `jax.default_matmul_precision` says otherwise.
        tp_size: P; an error if the axis has another size. None does not check.

    Returns:
        [M / P, N] in x's dtype, rows `i M / P` to `(i + 1) M / P` on device i.

    Raises:
        ValueError: `axis_name` is neither bound nor an axis of a mesh, or `in_specs` do not split the contracted
            elements over it; or the rows of x do not divide among the devices.

    Example:
        ```python
        import jax
        import jax.numpy as jnp
        from ejkernel.modules import reduce_scatter_matmul

        mesh = jax.make_mesh((jax.device_count(),), ("tp",), axis_types=(jax.sharding.AxisType.Auto,))
        x, y = jnp.ones((16, 32)), jnp.ones((8, 32))
        output = reduce_scatter_matmul(x, y, "tp", mesh=mesh)
        assert output.shape == (16, 8) and jnp.allclose(output, x @ y.T)
        ```
    """
    return run_operation(OP, locals())


class ReduceScatterMatmulArguments(ArgumentRecord, of=reduce_scatter_matmul):
    """The arguments of a call of `reduce_scatter_matmul`."""

    def __post_init__(self) -> None:
        set_canonical_fields(self, **canonical_fields(self))


def validate(args: ReduceScatterMatmulArguments) -> None:
    """Raises ValueError for a call that is wrong on every backend; the record has checked the rest."""
    check_matrices(args, 1)


def lower(args: ReduceScatterMatmulArguments) -> CollectiveMatmul:
    """Returns the collective-matmul record of a call."""
    return lower_to_record(args, "reduce_scatter", transpose_y=True)


def _route_to_mesh(args: ReduceScatterMatmulArguments, options: dict[str, Any]) -> tuple[Op, Any, dict[str, Any]]:
    validate(args)
    contracted = PartitionSpec(None, args.axis_name)
    specs = (contracted, contracted), PartitionSpec(args.axis_name)
    return OP, args, placement(args, options, {"x": 1, "y": 1}, specs, scatters_rows=True)


class ReduceScatterMatmul(Kernel[ReduceScatterMatmulConfig, Array]):
    """Wraps `reduce_scatter_matmul` in an object that an `Executor` can call."""


OP = Op(
    arguments=ReduceScatterMatmulArguments,
    family=family.FAMILY,
    validate=validate,
    lower=lower,
    cases=cases.reduce_scatter_cases(ReduceScatterMatmulArguments),
    tolerance=tolerances(float64=1e-11, float32=2e-5, bfloat16=2e-2, float16=3e-3),
    route=_route_to_mesh,
)
ReduceScatterMatmul.op = OP
