"""Weights of few bits: `quantize`, `dequantize` and `prepack_quantized_weights`, for `quantized_matmul`.

`pack_fp8_latents` and `unpack_fp8_latents` are for latent caches of 8 bits, which `token_sparse_attention` reads.

Weights are [out_features, in_features] = [N, K], as a layer `y = x w^T` has them. `axis` says how they lie:

    axis    packed                       scales, zeros              groups run along   quantized_matmul
    "row"   [K, ceil(N * bits / 32)]     [K, N / group_size]        out_features       transpose=False, the default
    "col"   [N, ceil(K * bits / 32)]     [N, K / group_size]        in_features        transpose=True

With nvfp4 and nvfp8 there is one more scale for the whole matrix, the tensor scale. What codes and scales mean in each
mode is in `ejkernel.planning.quantized_formats`.
"""

import functools
import importlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ejkernel import _compat
from ejkernel.checkpoints import from_awq, from_compressed_tensors, from_fp8_blocks, from_gptq, from_mxfp4, from_nvfp4
from ejkernel.planning.fp8_latents import pack_fp8_latents, unpack_fp8_latents
from ejkernel.planning.quantized_formats import (
    MODES,
    WORD_BITS,
    Format,
    Mode,
    decode,
    encode,
    integer_scales,
    make_format,
    pack,
    with_row_group_size,
)
from ejkernel.promotion import with_standard_promotion
from ejkernel.renamed import accept_older_names

__all__ = [
    "MODES",
    "Mode",
    "dequantize",
    "from_awq",
    "from_compressed_tensors",
    "from_fp8_blocks",
    "from_gptq",
    "from_mxfp4",
    "from_nvfp4",
    "pack_fp8_latents",
    "prepack_quantized_weights",
    "quantize",
    "unpack_fp8_latents",
]

QuantizedArrays = tuple[jax.Array, ...]
"""Words and scales; with affine codes their zeros, with nvfp4 and nvfp8 the tensor scale."""


@accept_older_names(runtime_config="scale_dtype")
@with_standard_promotion
def quantize(
    w: jax.Array,
    group_size: int | None = None,
    bits: int | None = None,
    mode: Mode = "affine",
    axis: str = "row",
    scale_dtype: Any = None,
) -> QuantizedArrays:
    """Quantises weights and packs their codes.

    A weight comes back with an error of at most half a step between codes (a whole one, where rounding up would leave
    the range of float32; what is subnormal in float32 may count as 0). Of affine codes a step is the group's
    scale: (max - min) / (2 ** bits - 1), but at least 2 ** -11 of the group's largest magnitude (of scales in bfloat16
    2 ** -8, in float32 2 ** -22), rounded up to `scale_dtype`.

    Args:
        w: [..., N, K] floating, finite.
        group_size: Neighbours that share a scale, a power of two from 16 to 1024, or -1 for whole rows; None for 64 of
            affine, symmetric and nf4, 128 of fp8, 32 of mxfp4 and mxfp8, 16 of nvfp4 and nvfp8. Divides N with
            `axis="row"` and K with `axis="col"`.
        bits: Of a code: 1 to 8 of affine and 2 to 8 of symmetric, None for 4; other modes have their own.
        mode: "affine" (integers with a scale and a zero: int4, int8), "symmetric" (without zeros), "fp8", "nf4",
            "mxfp4", "mxfp8", "nvfp4" or "nvfp8".
        axis: "row" or "col", see the module.
        scale_dtype: Of affine, symmetric and fp8 scales, and of zeros: float16, bfloat16 or float32; None for float16,
            of fp8 float32. float16 holds steps from 2 ** -24 to 65504; weights that need others are refused where their
            values can be read. Under a trace they cannot: scales that overflow are infinite there, so choose float32
            for weights of unknown size. A `QuantRuntimeConfig` gives its `affine_metadata_dtype` to affine codes.

    Returns:
        Words uint32 and scales; with `mode="affine"` also zeros, with nvfp4 and nvfp8 also the tensor scale, float32
        [...]. Scales of nf4 are float32, those without a `scale_dtype` uint8.

    Raises:
        ValueError: An argument is wrong; the message names it.
    """
    quantized_format = make_format(mode, bits, group_size)
    _check_axis(axis)
    if getattr(w, "ndim", 0) < 2 or not jnp.issubdtype(w.dtype, jnp.floating):
        raise ValueError(f"w: got {getattr(w, 'dtype', type(w))}{list(getattr(w, 'shape', ()))}, wants floating [N, K]")
    dtype = _scale_dtype(scale_dtype, quantized_format, w.dtype)
    with np.errstate(over="ignore"):  # float64 beyond float32 is refused below
        w = jnp.asarray(w)
    rows = jnp.swapaxes(w, -1, -2) if axis == "row" else w
    quantized_format = with_row_group_size(quantized_format, rows.shape[-1])
    if rows.shape[-1] == 0 or rows.shape[-1] % quantized_format.group_size:
        name = "N" if axis == "row" else "K"
        raise ValueError(
            f"w: got shape {tuple(w.shape)} with axis={axis!r}, "
            f"wants {name} in multiples of group_size {quantized_format.group_size}"
        )
    _check_finite_and_scales_fit(rows, quantized_format, dtype)
    return _quantize_rows(rows, quantized_format, dtype)


@functools.partial(jax.jit, static_argnums=(1, 2))
def _quantize_rows(rows: jax.Array, quantized_format: Format, dtype: Any) -> QuantizedArrays:
    encoded = encode(rows, quantized_format, dtype)
    optional = (encoded.zeros, encoded.tensor_scale)
    return (
        pack(encoded.codes, quantized_format.bits),
        encoded.scales,
        *(array for array in optional if array is not None),
    )


def _scale_dtype(scale_dtype: Any, quantized_format: Format, unquantised_dtype: Any) -> Any:
    """Returns the dtype of scales that `scale_dtype` asks for, by itself or as a `QuantRuntimeConfig`."""
    if hasattr(scale_dtype, "affine_metadata_dtype"):
        scale_dtype = scale_dtype.scale_dtype(unquantised_dtype, quantized_format.mode, quantized_format.scale_dtypes)
    name = jnp.dtype(quantized_format.scale_dtype if scale_dtype is None else scale_dtype).name
    if name not in quantized_format.scale_dtypes:
        raise ValueError(
            f"scale_dtype: got {name}, wants {' or '.join(quantized_format.scale_dtypes)} for {quantized_format.mode}"
        )
    return jnp.dtype(name)


def _check_finite_and_scales_fit(rows: jax.Array, quantized_format: Format, dtype: Any) -> None:
    """Refuses weights that are not finite or need scales that `dtype` cannot hold, where values can be read."""
    if _compat.is_tracer(rows) or not rows.is_fully_addressable or not rows.size:
        return
    finite, largest = jax.device_get(_finite_and_largest_scale(rows, quantized_format, dtype))
    if not finite:
        raise ValueError("w: got values that are not finite in float32, wants finite weights")
    if not quantized_format.integers and quantized_format.mode != "fp8":
        return
    # A step of less than four of float16's smallest would be up to a quarter larger than needed.
    smallest = 2.0**-22 if dtype == jnp.float16 else 0.0
    if largest > float(jnp.finfo(dtype).max) or 0 < largest < smallest:
        instead = "float32" if dtype == jnp.float16 else "more bits or smaller weights"
        raise ValueError(f"scale_dtype: got {dtype} for weights that need scales of {largest:.3g}, wants {instead}")


@functools.partial(jax.jit, static_argnums=(1, 2))
def _finite_and_largest_scale(
    rows: jax.Array, quantized_format: Format, dtype: Any
) -> tuple[jax.Array, jax.Array | int]:
    """Returns whether all weights are finite, and the largest scale that affine codes need."""
    values = rows.astype(jnp.float32)
    groups = values.reshape(*rows.shape[:-1], -1, quantized_format.group_size)
    # The largest scale of fp8 is that of the largest weight.
    largest = (
        integer_scales(groups, quantized_format, dtype).max()
        if quantized_format.integers
        else jnp.abs(values).max() / 448
    )
    return jnp.isfinite(values).all(), largest


@accept_older_names(w_q="packed", runtime_config="dtype")
@with_standard_promotion
def dequantize(
    packed: jax.Array,
    scales: jax.Array,
    zeros: jax.Array | None = None,
    group_size: int | None = None,
    bits: int | None = None,
    mode: Mode = "affine",
    axis: str = "row",
    dtype: Any = jnp.float32,
    tensor_scale: jax.Array | None = None,
) -> jax.Array:
    """Returns the weights [..., N, K] that `quantize` was given, as far as its codes say.

    Args:
        packed: Words uint32, as `quantize` returns them, or int32.
        scales: As `quantize` returns them; where it returns uint8, also the float8_e8m0fnu or float8_e4m3fn of those
            bits.
        zeros: Of affine codes. With nvfp4 and nvfp8 the third array of `quantize` may come here, which is the tensor
            scale.
        group_size: As given to `quantize`; so are the next three.
        bits: Of a code.
        mode: The format.
        axis: "row" or "col".
        dtype: Of the result; None for float32. A `QuantRuntimeConfig` gives its `output_dtype`.
        tensor_scale: float32 [...] of nvfp4 and nvfp8; None for 1.

    Raises:
        ValueError: An argument is wrong; the message names it.
    """
    quantized_format = make_format(mode, bits, group_size)
    _check_axis(axis)
    quantized_format = with_row_group_size(quantized_format, packed.shape[-1] * WORD_BITS // quantized_format.bits)
    zeros, tensor_scale = split_zeros_and_tensor_scale(zeros, tensor_scale, quantized_format)
    check_quantized(packed, scales, zeros, quantized_format, tensor_scale=tensor_scale)
    rows = _decode(as_uint32_words(packed), as_stored_scales(scales), zeros, quantized_format, tensor_scale)
    rows = rows.astype(getattr(dtype, "output_dtype", jnp.float32 if dtype is None else dtype))
    return jnp.swapaxes(rows, -1, -2) if axis == "row" else rows


_decode = jax.jit(decode, static_argnums=3)


@accept_older_names(runtime_config="scale_dtype")
def prepack_quantized_weights(
    w: jax.Array,
    group_size: int | None = None,
    bits: int | None = None,
    mode: Mode = "affine",
    transpose: bool = True,
    axis: str | None = None,
    scale_dtype: Any = None,
) -> QuantizedArrays:
    """Calls `quantize` with the axis as a truth value: `transpose=True` is "row", False is "col". If `axis` is given,
    it is used instead.

    `transpose` says whether [N, K] weights are turned to [K, N] before they are packed. With `transpose=False` weights
    that are [K, N] already become what `quantized_matmul` takes.
    """
    return quantize(w, group_size, bits, mode, ("row" if transpose else "col") if axis is None else axis, scale_dtype)


def as_uint32_words(packed: jax.Array) -> jax.Array:
    """Returns packed codes as uint32; checkpoints store the same bits as int32."""
    return lax.bitcast_convert_type(packed, jnp.uint32) if packed.dtype == jnp.int32 else packed


def as_stored_scales(scales: jax.Array) -> jax.Array:
    """Returns scales of 8 bits as uint8, and other scales unchanged."""
    return lax.bitcast_convert_type(scales, jnp.uint8) if scales.dtype.itemsize == 1 else scales


def split_zeros_and_tensor_scale(zeros: Any, tensor_scale: Any, quantized_format: Format) -> tuple[Any, Any]:
    """Returns zeros and tensor scale, where the third array of `quantize` may have been passed for zeros."""
    if quantized_format.has_tensor_scale and tensor_scale is None:
        return None, zeros
    return zeros, tensor_scale


def check_quantized(
    packed: Any,
    scales: Any,
    zeros: Any,
    quantized_format: Format,
    names: tuple[str, str, str, str] = ("w", "scales", "zeros", "tensor_scale"),
    tensor_scale: Any = None,
) -> None:
    """Checks packed weights against their format; `names` are what the message calls them.

    Raises:
        ValueError: An array does not fit the format. The message names the argument, what it is and what it should be.
    """
    if packed.dtype not in (jnp.uint32, jnp.int32) or packed.ndim < 2:
        raise ValueError(f"{names[0]}: got {packed.dtype}{list(packed.shape)}, wants packed codes uint32 [rows, words]")
    accepted = (*quantized_format.scale_dtypes, *_float8_scale_dtypes(quantized_format))
    if scales.dtype.name not in accepted:
        raise ValueError(
            f"{names[1]}: got dtype {scales.dtype}, wants {' or '.join(accepted)} for {quantized_format.mode}"
        )
    words = quantized_format.words_per_row(scales.shape[-1] * quantized_format.group_size) if scales.ndim else 0
    if scales.shape[:-1] != packed.shape[:-1] or words != packed.shape[-1]:
        columns = packed.shape[-1] * 32 // quantized_format.bits
        wants = f"[{', '.join(map(str, packed.shape[:-1]))}, {columns // quantized_format.group_size}]"
        raise ValueError(
            f"{names[1]}: got shape {tuple(scales.shape)}, wants {wants} for {names[0]} of shape "
            f"{tuple(packed.shape)}, {quantized_format.bits} bits and groups of {quantized_format.group_size}"
        )
    _check_scale_per_matrix(tensor_scale, packed.shape[:-2], quantized_format, names[3])
    if (zeros is None) != (quantized_format.mode != "affine"):
        wants = "zeros of the scales' shape" if quantized_format.mode == "affine" else "None"
        raise ValueError(
            f"{names[2]}: got {'None' if zeros is None else 'an array'} with mode {quantized_format.mode!r}, "
            f"wants {wants}"
        )
    if zeros is not None and (zeros.shape != scales.shape or zeros.dtype != scales.dtype):
        raise ValueError(
            f"{names[2]}: got {zeros.dtype}{list(zeros.shape)}, wants the scales' {scales.dtype}{list(scales.shape)}"
        )


def _float8_scale_dtypes(quantized_format: Format) -> tuple[str, ...]:
    """Returns floating dtypes of 8 bits that scales may have where they are stored in a uint8."""
    if quantized_format.has_power_of_two_scales:
        return ("float8_e8m0fnu",)
    return ("float8_e4m3fn",) if quantized_format.has_tensor_scale else ()


def _check_scale_per_matrix(tensor_scale: Any, shape: tuple[int, ...], quantized_format: Format, name: str) -> None:
    if tensor_scale is None:
        return
    if not quantized_format.has_tensor_scale:
        raise ValueError(
            f"{name}: got an array with mode {quantized_format.mode!r}, wants None; only nvfp4 and nvfp8 have one"
        )
    if tensor_scale.shape != shape or tensor_scale.dtype != jnp.float32:
        raise ValueError(
            f"{name}: got {tensor_scale.dtype}{list(tensor_scale.shape)}, wants float32{list(shape)}, one per matrix"
        )


def _check_axis(axis: Any) -> None:
    if axis not in ("row", "col"):
        raise ValueError(f"axis: got {axis!r}, wants 'row' or 'col'")


def __getattr__(name: str) -> Any:
    return importlib.import_module("ejkernel.compat.paths").resolve_old_name(__name__, name)
