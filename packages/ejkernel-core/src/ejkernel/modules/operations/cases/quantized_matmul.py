"""Inputs for `quantized_matmul`: the named cases every backend is tested on, and inputs of any given shapes."""

import dataclasses
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax import lax

from ejkernel.modules.operations.cases.tables import Row, make_cases_of_rows
from ejkernel.ops.model import Case
from ejkernel.planning.quantized_formats import Format, Mode, make_format
from ejkernel.quantization import quantize


@dataclasses.dataclass(frozen=True)
class MatmulSizes:
    """Shape and format of a call: rows, contracted elements, columns."""

    m: int = 5
    k: int = 96
    n: int = 128
    mode: Any = "affine"
    bits: int | None = None
    group_size: int | None = 32
    transpose: bool = False
    dtype: Any = jnp.float32
    scale_dtype: str | None = None


_CASE_TABLE: tuple[Row[MatmulSizes], ...] = (
    ("int4", MatmulSizes(), lambda k: {}, ("zeros",), ()),
    ("int4, transposed", MatmulSizes(transpose=True), lambda k: {}, ("zeros",), ()),
    ("int8", MatmulSizes(bits=8), lambda k: {}, ("zeros",), ()),
    ("3 bits", MatmulSizes(bits=3, group_size=16), lambda k: {}, ("zeros",), ("awkward",)),
    ("bfloat16 scales, transposed", MatmulSizes(transpose=True, scale_dtype="bfloat16"), lambda k: {}, ("zeros",), ()),
    ("float32 scales", MatmulSizes(bits=8, scale_dtype="float32"), lambda k: {}, ("zeros",), ("awkward",)),
    (
        "symmetric int4, transposed",
        MatmulSizes(mode="symmetric", transpose=True, scale_dtype="bfloat16"),
        lambda k: {},
        (),
        (),
    ),
    ("symmetric int8", MatmulSizes(mode="symmetric", bits=8), lambda k: {}, (), ("awkward",)),
    ("fp8, transposed", MatmulSizes(mode="fp8", transpose=True), lambda k: {}, (), ()),
    ("2 bits, one row", MatmulSizes(m=1, bits=2), lambda k: {}, ("zeros",), ("awkward",)),
    ("nf4", MatmulSizes(mode="nf4", group_size=64), lambda k: {}, (), ()),
    ("mxfp4", MatmulSizes(mode="mxfp4", n=160), lambda k: {}, (), ("awkward",)),
    ("mxfp8, transposed", MatmulSizes(mode="mxfp8", transpose=True), lambda k: {}, (), ()),
    (
        "nvfp4, transposed",
        MatmulSizes(mode="nvfp4", group_size=16, transpose=True),
        lambda k: {},
        ("tensor_scale",),
        (),
    ),
    ("nvfp8", MatmulSizes(mode="nvfp8", group_size=16), lambda k: {}, ("tensor_scale",), ()),
    ("square", MatmulSizes(k=64, n=64, transpose=True), lambda k: {}, ("zeros", "transpose"), ()),
    ("many rows", MatmulSizes(m=70, dtype=jnp.bfloat16), lambda k: {}, ("zeros",), ()),
    (
        "bfloat16, transposed",
        MatmulSizes(m=17, transpose=True, dtype=jnp.bfloat16),
        lambda k: {"precision": jax.lax.Precision.HIGHEST},
        ("zeros", "precision"),
        (),
    ),
    ("decoding", MatmulSizes(16, 4096, 14336, group_size=64, dtype=jnp.bfloat16), lambda k: {}, ("zeros",), ("bench",)),
    ("small decoding", MatmulSizes(16, 1024, 2048, group_size=64), lambda k: {}, ("zeros",), ("bench_cpu",)),
)


def cases(record_type: type) -> tuple[Case, ...]:
    """Returns the named cases as argument records of the given type."""
    return make_cases_of_rows(record_type, make_base_inputs, _CASE_TABLE)


def make_base_inputs(key: jax.Array, sizes: MatmulSizes) -> dict[str, Any]:
    """Returns what every case gives."""
    z, (one, other) = sizes, jax.random.split(key)
    # Outputs of the size of 1, as a model's weights make them: kernels may round weights, which adds up as they do.
    weights = jax.random.normal(other, (z.n, z.k), jnp.float32) * z.k**-0.5
    axis = "col" if z.transpose else "row"
    packed, scales, *zeros = quantize(weights, z.group_size, z.bits, z.mode, axis, z.scale_dtype)
    return {
        "x": jax.random.normal(one, (z.m, z.k), jnp.float32).astype(z.dtype),
        "w": packed,
        "scales": scales,
        "zeros": zeros[0] if zeros else None,
        "transpose": z.transpose,
        "group_size": z.group_size,
        "bits": z.bits,
        "mode": z.mode,
    }


def make_inputs(args: Any, key: jax.Array) -> Any:
    """Returns concrete arguments of the given shapes, valid as a call: normal x, and codes and scales of normal
    weights.

    Args:
        args: Argument record with `jax.ShapeDtypeStruct` leaves.
        key: PRNG key.
    """
    one, other = jax.random.split(key)
    form = make_format(args.mode, args.bits, args.group_size)
    packed = quantized_weights_like({"w": args.w, "scales": args.scales}, form, other)
    optional = {name: packed.get(name) for name in ("zeros", "tensor_scale") if getattr(args, name) is not None}
    x = jax.random.normal(one, args.x.shape, jnp.float32).astype(args.x.dtype)
    return dataclasses.replace(args, x=x, w=packed["w"], scales=packed["scales"], **optional)


def quantized_weights_like(
    weights_and_scales: dict[str, Any], weight_format: Format, key: jax.Array
) -> dict[str, jax.Array]:
    """Returns quantised normal weights: `w` and `scales` like those stored, and zeros or the tensor scale of their
    format.
    """
    scales = weights_and_scales["scales"]
    *rows, groups = scales.shape
    weights = jax.random.normal(key, (*rows, groups * weight_format.group_size), jnp.float32)
    dtype = scales.dtype if len(weight_format.scale_dtypes) > 1 else None
    packed, values, *zeros = quantize(
        weights, weight_format.group_size, weight_format.bits, cast(Mode, weight_format.mode), "col", dtype
    )
    arrays = {"w": packed, "scales": values}
    arrays = {name: lax.bitcast_convert_type(array, weights_and_scales[name].dtype) for name, array in arrays.items()}
    return arrays | dict(zip(("tensor_scale" if weight_format.has_tensor_scale else "zeros",), zeros, strict=False))
