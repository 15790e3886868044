"""Gated grouped matmul: the first product of an expert layer, with its gather and its activation."""

from collections.abc import Iterable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Integer

from ejkernel.families import gated_grouped_matmul as family
from ejkernel.families.grouped_matmul import LEFT_OVER
from ejkernel.modules.operations.cases import gated_grouped_matmul as cases
from ejkernel.modules.operations.configs import GatedGroupedMatmulConfig
from ejkernel.modules.operations.shared.conditions import groups, has_rank
from ejkernel.modules.operations.shared.paged_arguments import as_choice, settle
from ejkernel.modules.operations.shared.shapes import as_precision, check_dtype, check_not_empty, check_shape
from ejkernel.ops.execution.kernel import Kernel
from ejkernel.ops.model import Op, Tolerance
from ejkernel.ops.operation import operation
from ejkernel.ops.values import Condition
from ejkernel.types.arguments import arguments, static


@arguments
class GatedGroupedMatmulArguments:
    """The arguments of `gated_grouped_matmul`, which documents them; canonical from the moment they are made."""

    lhs: jax.Array
    rhs: jax.Array
    group_sizes: jax.Array
    indices: jax.Array | None = None
    activation: str = static("silu")
    precision: Any = static(None)
    left_over: str = static("zero")

    def __post_init__(self) -> None:
        left_over = as_choice("left_over", self.left_over, LEFT_OVER)
        settle(self, precision=as_precision("precision", self.precision), left_over=left_over)


@operation(lambda: OP)
def gated_grouped_matmul(
    lhs: Float[Array, "t k"],
    rhs: Float[Array, "e k n"],
    group_sizes: Integer[Array, " e"],
    indices: Integer[Array, " m"] | None = None,
    *,
    activation: str = "silu",
    precision: Any = None,
    left_over: Literal["zero", "undefined"] = "zero",
    platform: str | None = None,
    cfg: GatedGroupedMatmulConfig | None = None,
    mesh: jax.sharding.Mesh | None = None,
    in_specs: Any = None,
    out_specs: Any = None,
) -> Float[Array, "m f"]:
    """`act(y[:, :F]) * y[:, F:]` for `y = grouped_matmul(lhs[indices], rhs, group_sizes)`, in one kernel on GPUs.

    Shape letters: T tokens, K contracted elements, E matrices (experts), N = 2 F columns, M rows. Neither the gathered
    rows nor the products are in memory. It is for inference: it has no gradient and refuses to be differentiated.
    Training needs the products again, so it takes `gather_reduce`, `grouped_matmul` and the activation one by one, as
    `examples/moe.py` does. The formula is in `ejkernel.families.gated_grouped_matmul`.

    Args:
        lhs: [T, K] float16, bfloat16, float32 or float64.
        rhs: [E, K, 2 F] in lhs's dtype, the columns of the gate first.
        group_sizes: [E] int, rows of every group. May be traced; groups may be empty, and rows may be left over.
        indices: [M] int, the token of every row; a number outside of 0..T-1 names none. None for row m of token m.
        activation: `"silu"` (SwiGLU), or `"gelu"` by its tanh formula.
        precision: `jax.lax.Precision`, or its name, of the product; as `grouped_matmul` takes it.
        left_over: Rows of no group: `"zero"`, or `"undefined"` where nothing reads them, likewise.

    Returns:
        [M, F] in lhs's dtype; 0 for rows of no group, or what `left_over` says, and for those of no token.

    Raises:
        ValueError: A shape, dtype or value is wrong; the message names the argument.
        NotImplementedError: The call is differentiated.
        NoImplementationError: No backend serves the call; the message is the table of reasons.

    Example:
        ```python
        import jax
        import jax.numpy as jnp
        from ejkernel.modules import gated_grouped_matmul

        tokens = jnp.array([[1.0], [2.0]])
        experts = jnp.array([[[1.0, 3.0]], [[1.0, 5.0]]])  # gate and factor of two experts
        rows = gated_grouped_matmul(tokens, experts, jnp.array([1, 2]), jnp.array([1, 0, 1]))
        assert jnp.allclose(rows[:, 0], jax.nn.silu(jnp.array([2.0, 1.0, 2.0])) * jnp.array([6.0, 5.0, 10.0]))
        ```
    """
    ...


def validate(args: GatedGroupedMatmulArguments) -> None:
    """Raises ValueError for arguments that are wrong on every backend."""
    sizes: dict[str, int] = {}
    for name, axes in (("lhs", "T K"), ("rhs", "E K N"), ("group_sizes", "E"), ("indices", "M")):
        if getattr(args, name) is not None:
            check_shape(name, getattr(args, name), axes, sizes)
    check_not_empty("rhs", args.rhs, "E K N", "E K N")
    check_dtype("lhs", args.lhs, jnp.floating, "a floating dtype")
    if args.lhs.dtype.itemsize < 2 or args.rhs.dtype != args.lhs.dtype:
        raise ValueError(f"rhs: got {args.rhs.dtype} with lhs {args.lhs.dtype}, wants one dtype of 16 bits or more")
    for name in ("group_sizes", "indices"):
        if getattr(args, name) is not None:
            check_dtype(name, getattr(args, name), jnp.integer, "an integer dtype")
    if sizes["N"] % 2:
        raise ValueError(f"rhs: got {sizes['N']} columns, wants as many of the gate as of the others")
    if args.activation not in family.ACTIVATIONS:
        raise ValueError(f"activation: got {args.activation!r}, wants one of {', '.join(family.ACTIVATIONS)}")


def conditions(args: GatedGroupedMatmulArguments) -> Iterable[Condition]:
    """There are rows for all groups."""
    name = "lhs" if args.indices is None else "indices"
    if has_rank(args, group_sizes=1) and getattr(getattr(args, name), "shape", ()):
        yield from groups(args.group_sizes, getattr(args, name).shape[0], name)


def lower(args: GatedGroupedMatmulArguments) -> family.GatedGroupedMatmul:
    """The record of a call."""
    return family.GatedGroupedMatmul(
        lhs=args.lhs,
        rhs=args.rhs,
        group_sizes=args.group_sizes.astype(jnp.int32),
        indices=None if args.indices is None else args.indices.astype(jnp.int32),
        activation=args.activation,
        precision=args.precision,
        left_over=args.left_over,
    )


def reference(args: GatedGroupedMatmulArguments) -> jax.Array:
    """The operation's meaning in plain jnp."""
    return family.reference(lower(args))[0]


class GatedGroupedMatmul(Kernel[GatedGroupedMatmulConfig, Array]):
    """`gated_grouped_matmul` as an object."""


OP = Op(
    name="gated_grouped_matmul",
    function=gated_grouped_matmul,
    arguments=GatedGroupedMatmulArguments,
    family=family.FAMILY,
    config=GatedGroupedMatmulConfig,
    validate=validate,
    lower=lower,
    conditions=conditions,
    reference=reference,
    cases=cases.cases(GatedGroupedMatmulArguments),
    tolerance={
        "float64": Tolerance(rtol=1e-11, atol=1e-11),
        "float32": Tolerance(rtol=1e-4, atol=1e-4),
        "bfloat16": Tolerance(rtol=1e-2, atol=1e-2),
        "float16": Tolerance(rtol=2e-3, atol=2e-3),
    },
    make_inputs=cases.make_inputs,
    axes={"lhs": "t k", "rhs": "e k n", "group_sizes": "e", "indices": "m"},
)
GatedGroupedMatmul.op = OP
