"""Weights of few bits: `quantize`, `dequantize` and `prepack_quantized_weights`, for `quantized_matmul`.

Weights are [out_features, in_features] = [N, K], as a layer `y = x w^T` has them. `axis` says how they lie:

    axis    packed                       scales, zeros              groups run along   quantized_matmul
    "row"   [K, ceil(N * bits / 32)]     [K, N / group_size]        out_features       transpose=False, the default
    "col"   [N, ceil(K * bits / 32)]     [N, K / group_size]        in_features        transpose=True

What codes and scales mean in each mode is in `ejkernel.planning.quantized_formats`.
"""

from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.planning.quantized_formats import MODES, Format, Mode, decode, encode, make_format, pack

__all__ = ["MODES", "Mode", "dequantize", "prepack_quantized_weights", "quantize"]

Quantized = tuple[jax.Array, ...]
"""Words and scales; of affine codes zeros, too."""


def quantize(
    w: jax.Array,
    group_size: int | None = None,
    bits: int | None = None,
    mode: Mode = "affine",
    axis: str = "row",
) -> Quantized:
    """Quantises weights and packs their codes.

    Args:
        w: [..., N, K] floating, finite.
        group_size: Neighbours that share a scale, a power of two from 16 to 1024; None for 64 of affine and nf4, 32 of
            mxfp4 and mxfp8, 16 of nvfp4 and nvfp8. Divides N with `axis="row"` and K with `axis="col"`.
        bits: Of a code: 1 to 8 of affine, None for 4; other modes have their own.
        mode: "affine" (integers with a scale and a zero: int4, int8), "nf4", "mxfp4", "mxfp8", "nvfp4" or "nvfp8".
        axis: "row" or "col", see the module.

    Returns:
        Words uint32 and scales; with `mode="affine"` zeros, too. Scales and zeros of affine are float16, scales of nf4
        float32, others uint8.

    Raises:
        ValueError: An argument is wrong; the message names it.
    """
    form = make_format(mode, bits, group_size)
    _check_axis(axis)
    if getattr(w, "ndim", 0) < 2 or not jnp.issubdtype(w.dtype, jnp.floating):
        raise ValueError(f"w: got {getattr(w, 'dtype', type(w))}{list(getattr(w, 'shape', ()))}, wants floating [N, K]")
    rows = jnp.swapaxes(w, -1, -2) if axis == "row" else w
    if rows.shape[-1] == 0 or rows.shape[-1] % form.group_size:
        name = "N" if axis == "row" else "K"
        raise ValueError(
            f"w: got shape {tuple(w.shape)} with axis={axis!r}, "
            f"wants {name} in multiples of group_size {form.group_size}"
        )
    codes, scales, zeros = encode(rows, form)
    packed = pack(codes, form.bits)
    return (packed, scales) if zeros is None else (packed, scales, zeros)


def dequantize(
    packed: jax.Array,
    scales: jax.Array,
    zeros: jax.Array | None = None,
    group_size: int | None = None,
    bits: int | None = None,
    mode: Mode = "affine",
    axis: str = "row",
    dtype: Any = jnp.float32,
) -> jax.Array:
    """The weights [..., N, K] that `quantize` was given, as far as its codes say.

    Args:
        packed: Words uint32, as `quantize` returns them.
        scales: As `quantize` returns them.
        zeros: Likewise; with `mode="affine"` alone.
        group_size: As given to `quantize`; so are the next three.
        bits: Of a code.
        mode: The format.
        axis: "row" or "col".
        dtype: Of the result.

    Raises:
        ValueError: An argument is wrong; the message names it.
    """
    form = make_format(mode, bits, group_size)
    _check_axis(axis)
    check_quantized(packed, scales, zeros, form)
    rows = decode(packed, scales, zeros, form).astype(dtype)
    return jnp.swapaxes(rows, -1, -2) if axis == "row" else rows


def prepack_quantized_weights(
    w: jax.Array,
    group_size: int | None = None,
    bits: int | None = None,
    mode: Mode = "affine",
    transpose: bool = True,
    axis: str | None = None,
) -> Quantized:
    """`quantize`, with the axis as a truth value: `transpose=True` is "row", False is "col"; `axis` wins.

    `transpose` says whether [N, K] weights are turned to [K, N] before they are packed. With `transpose=False` weights
    that are [K, N] already become what `quantized_matmul` takes.
    """
    return quantize(w, group_size, bits, mode, ("row" if transpose else "col") if axis is None else axis)


def check_quantized(
    packed: Any, scales: Any, zeros: Any, form: Format, names: tuple[str, str, str] = ("w", "scales", "zeros")
) -> None:
    """Checks packed weights against their format; `names` are what the message calls them.

    Raises:
        ValueError: They do not fit; the message names the argument, what it is and what it should be.
    """
    if packed.dtype != jnp.uint32 or packed.ndim < 2:
        raise ValueError(f"{names[0]}: got {packed.dtype}{list(packed.shape)}, wants packed codes uint32 [rows, words]")
    if scales.dtype != form.scale_dtype:
        raise ValueError(f"{names[1]}: got dtype {scales.dtype}, wants {jnp.dtype(form.scale_dtype)} for {form.mode}")
    words = form.words(scales.shape[-1] * form.group_size) if scales.ndim else 0
    if scales.shape[:-1] != packed.shape[:-1] or words != packed.shape[-1]:
        columns = packed.shape[-1] * 32 // form.bits
        wants = f"[{', '.join(map(str, packed.shape[:-1]))}, {columns // form.group_size}]"
        raise ValueError(
            f"{names[1]}: got shape {tuple(scales.shape)}, wants {wants} for {names[0]} of shape "
            f"{tuple(packed.shape)}, {form.bits} bits and groups of {form.group_size}"
        )
    if (zeros is None) != (form.mode != "affine"):
        wants = "zeros of the scales' shape" if form.mode == "affine" else "None"
        raise ValueError(
            f"{names[2]}: got {'None' if zeros is None else 'an array'} with mode {form.mode!r}, wants {wants}"
        )
    if zeros is not None and (zeros.shape != scales.shape or zeros.dtype != scales.dtype):
        raise ValueError(
            f"{names[2]}: got {zeros.dtype}{list(zeros.shape)}, wants the scales' {scales.dtype}{list(scales.shape)}"
        )


def _check_axis(axis: Any) -> None:
    if axis not in ("row", "col"):
        raise ValueError(f"axis: got {axis!r}, wants 'row' or 'col'")
