"""All-gather matmul: the rows of all devices times this device's columns, transfers hidden under products."""

from typing import Any

import jax
from jax import lax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float

from ejkernel.families import collective_matmul as family
from ejkernel.families.collective_matmul import CollectiveMatmul
from ejkernel.modules.operations.cases import collective_matmul as cases
from ejkernel.modules.operations.configs import AllGatherMatmulConfig
from ejkernel.modules.operations.shared.collective_products import (
    canonical_fields,
    check_matrices,
    lower_to_record,
    placement,
)
from ejkernel.modules.operations.shared.paged_arguments import set_canonical_fields
from ejkernel.modules.operations.shared.shapes import as_flag
from ejkernel.ops.argument_records import ArgumentRecord
from ejkernel.ops.execution.kernel import Kernel
from ejkernel.ops.model import Op, tolerances
from ejkernel.ops.operation import document_options, run_operation


@document_options
def all_gather_matmul(
    x: Float[Array, "s k"],
    y: Float[Array, "k n"] | Float[Array, "n k"],
    axis_name: str | None,
    *,
    rhs_transpose: bool = False,
    collective_id: int = 0,
    precision: lax.PrecisionLike = None,
    tp_size: int | None = None,
    platform: str | None = None,
    cfg: AllGatherMatmulConfig | None = None,
    mesh: jax.sharding.Mesh | None = None,
    in_specs: Any = None,
    out_specs: Any = None,
) -> Float[Array, "m n"]:
    """Multiplies the rows of all devices along a mesh axis with this device's matrix: `all_gather(x) @ y`.

    The first product of a tensor-parallel layer whose activations are split by tokens. Each device multiplies the rows
    that it has while those of others arrive (Wang et al. 2023, ASPLOS), so that no step waits for a whole gather. The
    gradient of x is a `reduce_scatter_matmul`, and that of y overlaps the same transfers.

    Shape letters: P devices along the axis, M rows of one device, K contracted elements, N columns of one device.

    Where `axis_name` is bound, as in a function under `jax.shard_map`, arrays are the calling device's. With `mesh`, or
    a mesh set by `jax.set_mesh`, they are those of the whole call, x split by rows and y by columns. With
    `axis_name=None`, one device has everything.

    Args:
        x: [M, K] float16, bfloat16, float32 or float64. Differentiable.
        y: [K, N], or [N, K] with `rhs_transpose`; dtype of x. Differentiable.
        axis_name: The mesh axis.
        rhs_transpose: Whether the rows of y are columns of the product.
        collective_id: Number of the barrier with which TPU kernels begin. Kernels of different calls that may run at
            the same time must differ in it; no other backend reads it.
        precision: `jax.lax.Precision`, or its name, of the matrix products. None takes all digits of float32 and wider
            inputs, unless `jax.default_matmul_precision` says otherwise.
        tp_size: P; an error if the axis has another size. None does not check.

    Returns:
        [P M, N] in x's dtype, the rows of device i from row `i M`. Sums are float32 (float64 for float64).

    Raises:
        ValueError: `axis_name` is neither bound nor an axis of a mesh, or `in_specs` do not split the rows of x over
            it.

    Example:
        ```python
        import jax
        import jax.numpy as jnp
        from ejkernel.modules import all_gather_matmul

        mesh = jax.make_mesh((jax.device_count(),), ("tp",), axis_types=(jax.sharding.AxisType.Auto,))
        x, y = jnp.ones((16, 8)), jnp.ones((8, 32))
        output = all_gather_matmul(x, y, "tp", mesh=mesh)
        assert output.shape == (16, 32) and jnp.allclose(output, x @ y)
        ```
    """
    return run_operation(OP, locals())


class AllGatherMatmulArguments(ArgumentRecord, of=all_gather_matmul):
    """The arguments of a call of `all_gather_matmul`."""

    def __post_init__(self) -> None:
        rhs_transpose = as_flag("rhs_transpose", self.rhs_transpose)
        set_canonical_fields(self, rhs_transpose=rhs_transpose, **canonical_fields(self))


def validate(args: AllGatherMatmulArguments) -> None:
    """Raises ValueError for a call that is wrong on every backend; the record has checked the rest."""
    check_matrices(args, 1 if args.rhs_transpose else 0)


def lower(args: AllGatherMatmulArguments) -> CollectiveMatmul:
    """Returns the collective-matmul record of a call."""
    return lower_to_record(args, "all_gather", transpose_y=args.rhs_transpose)


def axes_of(args: AllGatherMatmulArguments) -> dict[str, str]:
    """Returns the axis letters that differ: of a transposed y, and of a call on one device."""
    letters = {"y": "n k"} if args.rhs_transpose else {}
    return letters if args.axis_name is not None else {**letters, "x": "m k"}


def _route_to_mesh(args: AllGatherMatmulArguments, options: dict[str, Any]) -> tuple[Op, Any, dict[str, Any]]:
    validate(args)
    axis = args.axis_name
    columns = PartitionSpec(None, axis)
    specs = (PartitionSpec(axis), PartitionSpec(axis) if args.rhs_transpose else columns), columns
    return OP, args, placement(args, options, {"x": 0}, specs, scatters_rows=False)


class AllGatherMatmul(Kernel[AllGatherMatmulConfig, Array]):
    """Wraps `all_gather_matmul` in an object that an `Executor` can call."""


OP = Op(
    arguments=AllGatherMatmulArguments,
    family=family.FAMILY,
    validate=validate,
    lower=lower,
    cases=cases.all_gather_cases(AllGatherMatmulArguments),
    tolerance=tolerances(float64=1e-11, float32=2e-5, bfloat16=2e-2, float16=3e-3),
    axes={"x": "s k", "y": "k n"},
    axes_of=axes_of,
    route=_route_to_mesh,
)
AllGatherMatmul.op = OP
