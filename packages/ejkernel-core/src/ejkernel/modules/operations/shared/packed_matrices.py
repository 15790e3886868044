"""Matrices of experts as `quantize` packs them, in the operations that multiply groups of rows."""

import dataclasses
from typing import Any, TypeVar, cast

import jax
import jax.numpy as jnp

from ejkernel.modules.operations.shared.paged_arguments import set_canonical_fields
from ejkernel.modules.operations.shared.shapes import check_shape
from ejkernel.planning.precision import rounded
from ejkernel.planning.quantized_formats import WORD_BITS, Format, decode, make_format, with_row_group_size
from ejkernel.quantization import as_stored_scales, as_uint32_words, check_quantized, split_zeros_and_tensor_scale

Record = TypeVar("Record")


def set_canonical_format(args: Any) -> None:
    """Gives the arguments of packed matrices their canonical values.

    Raises:
        ValueError: There is no such format; or the call has one of its arguments without `rhs_mode`.
    """
    form = None
    if args.rhs_mode is not None:
        form = make_format(args.rhs_mode, args.rhs_bits, args.rhs_group_size)
        zeros, tensor_scale = split_zeros_and_tensor_scale(args.rhs_zeros, args.rhs_tensor_scale, form)
        set_canonical_fields(args, rhs_zeros=zeros, rhs_tensor_scale=tensor_scale)
    for name in ("rhs_bits", "rhs_group_size", "rhs_zeros", "rhs_tensor_scale"):
        if form is None and getattr(args, name) is not None:
            raise ValueError(f"{name}: got a value without rhs_mode, wants None")
    set_canonical_fields(
        args, rhs_bits=None if form is None else form.bits, rhs_group_size=None if form is None else form.group_size
    )


def with_checked_shapes(args: Record) -> Record:
    """Checks packed matrices and returns the arguments with the shape of what they hold.

    Raises:
        ValueError: The arrays do not fit their format.
    """
    inputs = cast(Any, args)
    form = _format_of_packed_matrices(inputs)
    if not is_matmul_dtype(inputs.lhs.dtype):
        raise ValueError(f"lhs: got {inputs.lhs.dtype} with rhs_mode, wants a floating dtype of 16 bits or more")
    if inputs.rhs_scale is None:
        raise ValueError(f"rhs_scale: got None with rhs_mode {form.mode!r}, wants the scales that quantize returns")
    check_shape("rhs", inputs.rhs, "E rows words", {})
    names = ("rhs", "rhs_scale", "rhs_zeros", "rhs_tensor_scale")
    check_quantized(inputs.rhs, inputs.rhs_scale, inputs.rhs_zeros, form, names, inputs.rhs_tensor_scale)
    *rows, groups = inputs.rhs_scale.shape
    return _with_plain_matrices(args, jax.ShapeDtypeStruct((*rows, groups * form.group_size), inputs.lhs.dtype))


def with_dequantised_matrices(args: Record) -> Record:
    """Returns the arguments with packed matrices in lhs's dtype."""
    inputs = cast(Any, args)
    values = decode(
        as_uint32_words(inputs.rhs),
        as_stored_scales(inputs.rhs_scale),
        inputs.rhs_zeros,
        _format_of_packed_matrices(inputs),
        inputs.rhs_tensor_scale,
    )
    return _with_plain_matrices(args, rounded(values, inputs.lhs.dtype).astype(inputs.lhs.dtype))


def packed_axes(args: Any) -> dict[str, str]:
    """Returns the axis letters of packed matrices."""
    row = "n" if args.transpose_rhs else "k"
    return {"rhs": f"e {row} w", "rhs_scale": f"e {row} q", "rhs_zeros": f"e {row} q", "rhs_tensor_scale": "e"}


def is_matmul_dtype(dtype: Any) -> bool:
    """Returns whether matrices of a dtype can be multiplied as they are."""
    return jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits >= 16


def _format_of_packed_matrices(args: Any) -> Format:
    """Returns the format of packed matrices; groups of whole rows have the rows' size."""
    form = make_format(args.rhs_mode, args.rhs_bits, args.rhs_group_size)
    return with_row_group_size(form, args.rhs.shape[-1] * WORD_BITS // form.bits)


def _with_plain_matrices(args: Record, rhs: Any) -> Record:
    """Returns the arguments with matrices that are not packed."""
    packed = ("rhs_scale", "rhs_zeros", "rhs_tensor_scale", "rhs_mode", "rhs_bits", "rhs_group_size")
    return dataclasses.replace(cast(Any, args), rhs=rhs, **dict.fromkeys(packed))
