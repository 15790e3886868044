"""Gated grouped matmul: the first product of an expert layer, with its gather and its activation."""

from collections.abc import Iterable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Integer, Num

from ejkernel.families import gated_grouped_matmul as family
from ejkernel.families.grouped_matmul import UNASSIGNED_ROW_CHOICES
from ejkernel.modules.operations.cases import gated_grouped_matmul as cases
from ejkernel.modules.operations.configs import GatedGroupedMatmulConfig
from ejkernel.modules.operations.shared.conditions import group_size_conditions, have_ranks
from ejkernel.modules.operations.shared.packed_matrices import (
    packed_axes,
    set_canonical_format,
    with_checked_shapes,
    with_dequantised_matrices,
)
from ejkernel.modules.operations.shared.paged_arguments import as_choice, set_canonical_fields
from ejkernel.modules.operations.shared.recurrences import rank
from ejkernel.modules.operations.shared.shapes import (
    as_flag,
    as_number,
    as_precision,
    check_dtype,
    check_not_empty,
    check_shape,
)
from ejkernel.ops.argument_records import ArgumentRecord
from ejkernel.ops.execution.kernel import Kernel
from ejkernel.ops.model import Op, tolerances
from ejkernel.ops.operation import document_options, run_operation
from ejkernel.ops.values import Condition
from ejkernel.planning.quantized_formats import Mode


@document_options
def gated_grouped_matmul(
    lhs: Float[Array, "t k"],
    rhs: Num[Array, "e k n"] | Num[Array, "e n k"] | Integer[Array, "e rows words"],
    group_sizes: Integer[Array, " e"],
    indices: Integer[Array, " m"] | None = None,
    *,
    rhs_bias: Float[Array, "e 1 n"] | Float[Array, "e n"] | None = None,
    rhs_scale: Float[Array, "e blocks 1 n"] | Num[Array, "e rows scales"] | None = None,
    rhs_zeros: Float[Array, "e rows scales"] | Float[Array, " e"] | None = None,
    rhs_tensor_scale: Float[Array, " e"] | None = None,
    rhs_mode: Mode | None = None,
    rhs_bits: int | None = None,
    rhs_group_size: int | None = None,
    activation: str = "silu",
    transpose_rhs: bool = False,
    interleaved: bool = False,
    gated: bool = True,
    alpha: float = 1.0,
    beta: float = 0.0,
    limit: float | None = None,
    precision: Any = None,
    left_over: Literal["zero", "undefined"] = "zero",
    platform: str | None = None,
    cfg: GatedGroupedMatmulConfig | None = None,
    mesh: jax.sharding.Mesh | None = None,
    in_specs: Any = None,
    out_specs: Any = None,
) -> Float[Array, "m f"]:
    """Computes `act(y[:, :F]) * y[:, F:]` for `y = grouped_matmul(lhs[indices], rhs, group_sizes)`, in one kernel on
    GPUs.

    Shape letters: T tokens, K contracted elements, E matrices (experts), N = 2 F columns, M rows. Neither the gathered
    rows nor the products are in memory. The gradient computes both again; to train faster with more memory, call
    `gather_reduce`, `grouped_matmul` and the activation one by one, as `examples/moe.py` does. The formula is in
    `ejkernel.families.gated_grouped_matmul`.

    GPT-OSS's experts are `rhs_bias=..., interleaved=True, alpha=1.702, beta=1.0, limit=7.0`, and Nemotron-H's
    `gated=False, activation="relu2", transpose_rhs=True`.

    Args:
        lhs: [T, K] float16, bfloat16, float32 or float64. Differentiable.
        rhs: [E, K, 2 F] in lhs's dtype, the columns of the gate first; [E, 2 F, K] with `transpose_rhs`.
            Differentiable. Any numeric dtype with `rhs_scale`.
        group_sizes: [E] int, rows of every group. May be traced; groups may be empty, and rows may be left over.
        indices: [M] int, the token of every row; a number outside of 0..T-1 names none. None for row m of token m.
        rhs_bias: [E, 1, 2 F] or [E, 2 F] floating, added to the products of each expert. Differentiable.
        rhs_scale: [E, blocks, 1, 2 F] floating, factors on the matrices, as `grouped_matmul` takes them; XLA serves
            them. With `rhs_mode`, the scales that `quantize` makes.
        rhs_zeros: Of rhs_scale's shape and dtype, with `rhs_mode="affine"` alone.
        rhs_tensor_scale: float32 [E], the second scale of nvfp4 and nvfp8; None for 1.
        rhs_mode: Format of packed matrices, as `grouped_matmul` takes them: GPT-OSS's are those of `from_mxfp4`. They
            are dequantised to lhs's dtype before they are multiplied, which takes the memory of rhs in that dtype.
        rhs_bits: Of a code, with `rhs_mode`; None for what `quantize` takes.
        rhs_group_size: Neighbours that share a scale, as above.
        activation: `"silu"` (SwiGLU), or `"gelu"` by its tanh formula; without a gate also `"relu2"`, the squared ReLU.
        transpose_rhs: rhs is stored with its columns first, as most checkpoints have it.
        interleaved: Columns of the gate (even) and of the factor (odd) alternate.
        gated: False for experts without a gate: rhs has F columns, and the output is their activation.
        alpha: Factor in the sigmoid of silu.
        beta: Added to the factor.
        limit: Largest value of the gate, and largest magnitude of the factor before beta, > 0.
        precision: `jax.lax.Precision`, or its name, of the product; as `grouped_matmul` takes it.
        left_over: Unassigned rows: `"zero"`, or `"undefined"` where nothing reads them, as above.

    Returns:
        [M, F] in lhs's dtype; 0 for unassigned rows, or what `left_over` says, and for those of no token.

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
    return run_operation(OP, locals())


class GatedGroupedMatmulArguments(ArgumentRecord, of=gated_grouped_matmul):
    """The arguments of a call of `gated_grouped_matmul`."""

    def __post_init__(self) -> None:
        set_canonical_format(self)
        left_over = as_choice("left_over", self.left_over, UNASSIGNED_ROW_CHOICES)
        set_canonical_fields(self, precision=as_precision("precision", self.precision), left_over=left_over)
        set_canonical_fields(
            self, **{name: as_flag(name, getattr(self, name)) for name in ("transpose_rhs", "interleaved", "gated")}
        )
        limit = None if self.limit is None else as_number("limit", self.limit, greater_than=0)
        set_canonical_fields(self, alpha=as_number("alpha", self.alpha), beta=as_number("beta", self.beta), limit=limit)


def validate(args: GatedGroupedMatmulArguments) -> None:
    """Raises ValueError for arguments that are wrong on every backend."""
    if args.rhs_mode is not None:
        args = with_checked_shapes(args)
    sizes: dict[str, int] = {}
    matrices = "E N K" if args.transpose_rhs else "E K N"
    for name, axes in (("lhs", "T K"), ("rhs", matrices), ("group_sizes", "E"), ("indices", "M")):
        if getattr(args, name) is not None:
            check_shape(name, getattr(args, name), axes, sizes)
    check_not_empty("rhs", args.rhs, matrices, matrices)
    if args.rhs_bias is not None:
        check_shape("rhs_bias", args.rhs_bias, "E N" if rank(args.rhs_bias) == 2 else "E 1 N", {**sizes, "1": 1})
        check_dtype("rhs_bias", args.rhs_bias, jnp.floating, "a floating dtype")
    check_dtype("lhs", args.lhs, jnp.floating, "a floating dtype")
    if args.lhs.dtype.itemsize < 2 or (args.rhs_scale is None and args.rhs.dtype != args.lhs.dtype):
        raise ValueError(f"rhs: got {args.rhs.dtype} with lhs {args.lhs.dtype}, wants equal dtypes, 16 bits or more")
    _check_scale(args, sizes)
    for name in ("group_sizes", "indices"):
        if getattr(args, name) is not None:
            check_dtype(name, getattr(args, name), jnp.integer, "an integer dtype")
    if args.gated and sizes["N"] % 2:
        raise ValueError(f"rhs: got {sizes['N']} columns, wants an even number: half of them are the gate's")
    _check_activation(args)


def _check_scale(args: GatedGroupedMatmulArguments, sizes: dict[str, int]) -> None:
    if args.rhs_scale is None:
        return
    check_shape("rhs_scale", args.rhs_scale, "E blocks 1 N", {**sizes, "1": 1})
    check_dtype("rhs_scale", args.rhs_scale, jnp.floating, "a floating dtype")
    blocks = args.rhs_scale.shape[1]
    if not blocks or sizes["K"] % blocks:
        raise ValueError(f"rhs_scale: got {blocks} blocks, wants a divisor of the {sizes['K']} contracted elements")


_GATE_ARGUMENT_DEFAULTS = {"interleaved": False, "beta": 0.0, "limit": None}
"""Arguments of a gate, and their defaults."""


def _check_activation(args: GatedGroupedMatmulArguments) -> None:
    """Refuses an activation that there is not, and arguments that it does not have."""
    activations = family.ACTIVATIONS if args.gated else family.UNGATED_ACTIVATIONS
    if args.activation not in activations:
        gate = " with a gate" if args.gated else ""
        raise ValueError(f"activation: got {args.activation!r}{gate}, wants one of {', '.join(activations)}")
    if args.alpha != 1 and args.activation != "silu":
        raise ValueError(f"alpha: got {args.alpha} with activation={args.activation!r}, wants activation='silu'")
    for name, default in _GATE_ARGUMENT_DEFAULTS.items():
        if not args.gated and getattr(args, name) != default:
            raise ValueError(f"{name}: got {getattr(args, name)} with gated=False, wants the default, or gated=True")


def conditions(args: GatedGroupedMatmulArguments) -> Iterable[Condition]:
    """Yields the condition that there are rows for all groups."""
    name = "lhs" if args.indices is None else "indices"
    if have_ranks(args, group_sizes=1) and getattr(getattr(args, name), "shape", ()):
        yield from group_size_conditions(args.group_sizes, getattr(args, name).shape[0], name)


def lower(args: GatedGroupedMatmulArguments) -> family.GatedGroupedMatmul:
    """Returns the record of a call."""
    if args.rhs_mode is not None:
        args = with_dequantised_matrices(args)
    return family.GatedGroupedMatmul(
        lhs=args.lhs,
        rhs=args.rhs,
        group_sizes=args.group_sizes.astype(jnp.int32),
        indices=None if args.indices is None else args.indices.astype(jnp.int32),
        rhs_bias=args.rhs_bias if args.rhs_bias is None or args.rhs_bias.ndim == 3 else args.rhs_bias[:, None],
        rhs_scale=args.rhs_scale,
        activation=args.activation,
        transpose_rhs=args.transpose_rhs,
        interleaved=args.interleaved,
        gated=args.gated,
        alpha=args.alpha,
        beta=args.beta,
        limit=args.limit,
        precision=args.precision,
        left_over=args.left_over,
    )


def _axes_of(args: GatedGroupedMatmulArguments) -> dict[str, str]:
    """Returns the axis letters of packed matrices, and of those with their columns first."""
    if args.rhs_mode is not None:
        return packed_axes(args)
    return {"rhs": "e n k"} if args.transpose_rhs else {}


class GatedGroupedMatmul(Kernel[GatedGroupedMatmulConfig, Array]):
    """Wraps `gated_grouped_matmul` in an object that an `Executor` can call."""


OP = Op(
    arguments=GatedGroupedMatmulArguments,
    family=family.FAMILY,
    validate=validate,
    lower=lower,
    conditions=conditions,
    cases=cases.cases(GatedGroupedMatmulArguments),
    tolerance=tolerances(float64=1e-11, float32=1e-4, bfloat16=1e-2, float16=2e-3),
    make_inputs=cases.make_inputs,
    axes={"rhs": "e k n"},
    axes_of=_axes_of,
)
GatedGroupedMatmul.op = OP
