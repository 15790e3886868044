"""Grouped matmul: rows that come in groups, each group times one matrix."""

from collections.abc import Iterable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Integer, Num

from ejkernel.families import grouped_matmul as family
from ejkernel.families.grouped_matmul import GroupedMatmul as Record
from ejkernel.modules.operations.cases import grouped_matmul as cases
from ejkernel.modules.operations.configs import GroupedMatmulConfig
from ejkernel.modules.operations.shared.conditions import group_size_conditions, have_ranks
from ejkernel.modules.operations.shared.packed_matrices import (
    is_matmul_dtype,
    packed_axes,
    set_canonical_format,
    with_checked_shapes,
    with_dequantised_matrices,
)
from ejkernel.modules.operations.shared.paged_arguments import as_choice, set_canonical_fields
from ejkernel.modules.operations.shared.shapes import (
    as_flag,
    as_float_dtype,
    as_precision,
    check_dtype,
    check_not_empty,
    check_shape,
    got,
)
from ejkernel.ops.argument_records import ArgumentRecord
from ejkernel.ops.execution.kernel import Kernel
from ejkernel.ops.model import Op, tolerances
from ejkernel.ops.operation import document_options, run_operation
from ejkernel.ops.values import Condition
from ejkernel.planning.quantized_formats import Mode


def _refuse_unsupported_arguments(interpret: Any, out_shard_callback: Any) -> None:
    if interpret:
        raise NotImplementedError(
            "interpret: got True, wants False; set EJKERNEL_TPU_INTERPRET=1 to interpret the TPU kernels"
        )
    if out_shard_callback is not None:
        raise NotImplementedError(
            "out_shard_callback: got a value, wants None; apply it to the result, or pass mesh, in_specs and out_specs"
        )


@document_options
def grouped_matmul(
    lhs: Float[Array, "m k"],
    rhs: Num[Array, "e k n"] | Num[Array, "e n k"] | Integer[Array, "e rows words"],
    group_sizes: Integer[Array, " g"],
    group_offset: Integer[Array, ""] | Integer[Array, "1"] | int | None = None,
    existing_out: Float[Array, "m n"] | None = None,
    *,
    preferred_element_type: Any = None,
    rhs_scale: Float[Array, "e blocks 1 n"] | Num[Array, "e rows scales"] | None = None,
    rhs_bias: Float[Array, "e 1 n"] | None = None,
    lhs_scale: Float[Array, "m lhs_blocks"] | None = None,
    rhs_zeros: Float[Array, "e rows scales"] | Float[Array, " e"] | None = None,
    rhs_tensor_scale: Float[Array, " e"] | None = None,
    transpose_rhs: bool = False,
    rhs_mode: Mode | None = None,
    rhs_bits: int | None = None,
    rhs_group_size: int | None = None,
    precision: Any = None,
    left_over: Literal["zero", "undefined"] = "zero",
    use_v2: bool = False,
    use_v3: bool = False,
    do_padding: bool = True,
    interpret: bool = False,
    out_shard_callback: Any = None,
    platform: str | None = None,
    cfg: GroupedMatmulConfig | None = None,
    mesh: jax.sharding.Mesh | None = None,
    in_specs: Any = None,
    out_specs: Any = None,
) -> Float[Array, "m n"]:
    """Multiplies every group of rows with the matrix of its group (Gale et al. 2022, arXiv:2211.15841).

    Group g owns the `group_sizes[g]` rows after those of the groups before it. The formula is in
    `ejkernel.families.grouped_matmul`. Memory, forward and backward, is that of the arguments and one matrix.

    Over devices, rows and columns can be split. To split the groups, give every device its own `group_offset` and sum
    the results.

    Args:
        lhs: [M, K] float16, bfloat16, float32 or float64, or a floating dtype of 8 bits with `lhs_scale`.
        rhs: [E, K, N], or [E, N, K] with `transpose_rhs`; floating of 16 bits or more, or any numeric dtype with
            `rhs_scale`. Where it is not lhs's dtype, both are multiplied in the one that JAX promotes the two to.
        group_sizes: [E] int, rows of every group; with `group_offset`, [G] for all the groups there are. May be traced;
            an eager call waits for the values and checks them. Groups may be empty, and rows may be left over.
        group_offset: Integer, the group of the first matrix of rhs: these are then groups `offset` to `offset + E - 1`
            of all, and rows of the others are left over. May be traced.
        existing_out: [M, N] floating, added to the product; left-over rows are these values alone.
        preferred_element_type: Floating dtype of the output. None means float32, float64 for float64 lhs; lhs's
            dtype where rhs has another. Sums are never taken in less, but for what `precision` says of 8 bits.
        rhs_scale: [E, blocks, 1, N] floating, factors on the matrices: one per column and block of `K / blocks`
            contracted elements. With `rhs_mode`, [E, K, N / Q] or [E, N, K / Q] as `quantize` makes them.
        rhs_bias: [E, 1, N] floating, added to the rows of each group.
        lhs_scale: [M, blocks] floating, factors on the rows: one per row and block of `K / blocks` contracted elements.
            With it lhs may have 8 bits; where rhs has too, kernels multiply them as they are. A gradient of an array
            of 8 bits is rounded to its dtype.
        rhs_zeros: Of rhs_scale's shape and dtype, with `rhs_mode="affine"` alone. With nvfp4 and nvfp8 the third array
            of `quantize`, which is the tensor scale, may come here.
        rhs_tensor_scale: float32 [E], the second scale of nvfp4 and nvfp8; None for 1.
        transpose_rhs: Whether the matrices lie with their columns first.
        rhs_mode: Format of packed matrices, `quantize`'s `mode`: rhs is then uint32 [E, K, words], or [E, N, words]
            with `transpose_rhs`, or int32 of the same bits. All of them are dequantised to lhs's dtype before they are
            multiplied, which takes the memory of rhs in that dtype.
        rhs_bits: Of a code, with `rhs_mode`; None for what `quantize` takes.
        rhs_group_size: Q, as above.
        precision: `jax.lax.Precision`, or its name, of the matrix products; means what it means to JAX on the device.
            None takes all digits of float32 and wider inputs, unless `jax.default_matmul_precision` says otherwise.
            With `DEFAULT`, products of 8 bits may be summed in the fewer digits that Hopper's matrix unit keeps, about
            14 bits.
        left_over: Left-over rows of the output: `"zero"`, or `"undefined"`, any numbers and NaN, where nothing reads
            them. Kernels on GPUs then do not write them. Not with `existing_out`.
        use_v2: Either value; dispatch chooses the kernel.
        use_v3: Either value, as above.
        do_padding: Either value; no kernel needs rows in multiples of its tiles.
        interpret: Only False; `EJKERNEL_TPU_INTERPRET` interprets the TPU kernels.
        out_shard_callback: Only None; shard the result, or give `mesh`.

    Returns:
        [M, N]. Left-over rows are 0, or `existing_out`, or undefined, as `left_over` says. The gradient of
        left-over rows of lhs is 0.

    Example:
        ```python
        import jax.numpy as jnp
        from ejkernel.modules import grouped_matmul

        lhs = jnp.ones((5, 2))
        rhs = jnp.arange(3.0)[:, None, None] * jnp.ones((3, 2, 4))  # matrices of zeros, ones and twos
        output = grouped_matmul(lhs, rhs, jnp.array([1, 0, 3]))
        assert output[:, 0].tolist() == [0.0, 4.0, 4.0, 4.0, 0.0]
        ```
    """
    return run_operation(OP, locals())


class GroupedMatmulArguments(ArgumentRecord, of=grouped_matmul):
    """The arguments of a call of `grouped_matmul`."""

    def __post_init__(self) -> None:
        _refuse_unsupported_arguments(self.interpret, self.out_shard_callback)
        out_dtype = self.preferred_element_type
        set_canonical_format(self)
        set_canonical_fields(
            self,
            preferred_element_type=None if out_dtype is None else as_float_dtype("preferred_element_type", out_dtype),
            transpose_rhs=as_flag("transpose_rhs", self.transpose_rhs),
            precision=as_precision("precision", self.precision),
            left_over=as_choice("left_over", self.left_over, family.UNASSIGNED_ROW_CHOICES),
            # Dispatch chooses the kernel, and no kernel pads, so these arguments have no effect. Calls that differ only
            # in them are equal.
            use_v2=as_flag("use_v2", self.use_v2) and False,
            use_v3=as_flag("use_v3", self.use_v3) and False,
            do_padding=as_flag("do_padding", self.do_padding) or True,
        )


def validate(args: GroupedMatmulArguments) -> None:
    """Raises ValueError for arrays that are wrong on every backend; the record has checked the rest."""
    if args.rhs_mode is not None:
        args = with_checked_shapes(args)
    sizes: dict[str, int] = {"1": 1}
    axes = "E N K" if args.transpose_rhs else "E K N"
    check_shape("lhs", args.lhs, "M K", sizes)
    check_shape("rhs", args.rhs, axes, sizes)
    check_not_empty("rhs", args.rhs, axes, axes)
    check_dtype("lhs", args.lhs, jnp.floating, "a floating dtype")
    for name in ("lhs", "rhs"):
        dtype = getattr(args, name).dtype
        if getattr(args, f"{name}_scale") is None and not is_matmul_dtype(dtype):
            raise ValueError(f"{name}: got {dtype} without {name}_scale, wants a floating dtype of 16 bits or more")
    _check_groups(args, sizes)
    if args.existing_out is not None and args.left_over != "zero":
        raise ValueError(
            f"left_over: got {args.left_over!r} with existing_out, wants 'zero': unassigned rows keep existing_out"
        )
    shapes = {
        "existing_out": "M N",
        "rhs_scale": "E blocks 1 N",
        "rhs_bias": "E 1 N",
        "lhs_scale": "M lhs_blocks",
    }
    for name, wants in shapes.items():
        array = getattr(args, name)
        if array is not None:
            check_shape(name, array, wants, sizes)
            check_dtype(name, array, jnp.floating, "a floating dtype")
    for name, blocks in (("rhs_scale", sizes.get("blocks", 1)), ("lhs_scale", sizes.get("lhs_blocks", 1))):
        if blocks == 0 or sizes["K"] % blocks:
            raise ValueError(f"{name}: got {blocks} blocks, wants a divisor of the {sizes['K']} contracted elements")


def _check_groups(args: GroupedMatmulArguments, sizes: dict[str, int]) -> None:
    check_shape("group_sizes", args.group_sizes, "E" if args.group_offset is None else "G", sizes)
    check_dtype("group_sizes", args.group_sizes, jnp.integer, "an integer dtype")
    if args.group_offset is None:
        return
    check_not_empty("group_sizes", args.group_sizes, "G", "G")
    offset = jnp.asarray(args.group_offset)
    if offset.shape not in ((), (1,)) or not jnp.issubdtype(offset.dtype, jnp.integer):
        raise ValueError(
            f"group_offset: got {got(args.group_offset)}, wants an int, or an integer array of shape () or (1,)"
        )


def conditions(args: GroupedMatmulArguments) -> Iterable[Condition]:
    """Yields the condition that there are rows for all groups."""
    if have_ranks(args, lhs=2, group_sizes=1):
        yield from group_size_conditions(args.group_sizes, args.lhs.shape[0], "lhs")


def lower(args: GroupedMatmulArguments) -> Record:
    """Returns the grouped-matmul record of a call."""
    if args.rhs_mode is not None:
        args = with_dequantised_matrices(args)
    offset, out_dtype = args.group_offset, args.preferred_element_type
    lhs, rhs = args.lhs, args.rhs
    if args.rhs_scale is None and lhs.dtype != rhs.dtype:
        if is_matmul_dtype(lhs.dtype):
            out_dtype = lhs.dtype if out_dtype is None else out_dtype
            rhs = rhs.astype(jnp.promote_types(lhs.dtype, rhs.dtype))
        lhs = lhs.astype(rhs.dtype)
    return Record(
        lhs=lhs,
        rhs=rhs,
        group_sizes=args.group_sizes.astype(jnp.int32),
        out_dtype=family.product_sum_dtype(args.lhs.dtype) if out_dtype is None else out_dtype,
        group_offset=None if offset is None else jnp.asarray(offset).reshape(()).astype(jnp.int32),
        existing_out=args.existing_out,
        rhs_scale=args.rhs_scale,
        rhs_bias=args.rhs_bias,
        lhs_scale=args.lhs_scale,
        transpose_rhs=args.transpose_rhs,
        precision=args.precision,
        left_over=args.left_over,
    )


def axes_of(args: GroupedMatmulArguments) -> dict[str, str]:
    """Returns the axis letters of rhs where its columns come first, and of packed matrices."""
    if args.rhs_mode is not None:
        return packed_axes(args)
    return {"rhs": "e n k"} if args.transpose_rhs else {}


class GroupedMatmul(Kernel[GroupedMatmulConfig, Array]):
    """`grouped_matmul` as an object.

    Args:
        version: 1, 2 or 3; all are the same here.
    """

    def __init__(self, version: int = 1) -> None:
        if version not in (1, 2, 3):
            raise ValueError(f"version: got {version!r}, wants 1, 2 or 3")
        super().__init__()


OP = Op(
    arguments=GroupedMatmulArguments,
    family=family.FAMILY,
    validate=validate,
    lower=lower,
    conditions=conditions,
    cases=cases.cases(GroupedMatmulArguments),
    # With float8 outputs are float32 sums of exact products, which only the order of summation changes.
    tolerance=tolerances(float64=1e-11, float32=2e-5, bfloat16=2e-2, float16=3e-3, float8_e4m3fn=2e-4),
    make_inputs=cases.make_inputs,
    axes={"group_offset": "c"},
    axes_of=axes_of,
)
GroupedMatmul.op = OP
