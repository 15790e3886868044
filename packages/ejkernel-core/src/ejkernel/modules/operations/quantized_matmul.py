"""Quantised matmul: rows times a matrix of few bits, which is never in memory at full width."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int32, Num, UInt32

from ejkernel.families import quantized_matmul as family
from ejkernel.families.quantized_matmul import QuantizedMatmul as Record
from ejkernel.modules.operations.cases import quantized_matmul as cases
from ejkernel.modules.operations.configs import QuantizedMatmulConfig
from ejkernel.modules.operations.shared.paged_arguments import set_canonical_fields, with_tuning_arguments
from ejkernel.modules.operations.shared.shapes import as_flag, as_precision, check_dtype, check_shape
from ejkernel.ops.argument_records import ArgumentRecord
from ejkernel.ops.execution.kernel import Kernel
from ejkernel.ops.model import Op, tolerances
from ejkernel.ops.operation import document_options, run_operation
from ejkernel.planning.quantized_formats import (
    WORD_BITS,
    Format,
    Mode,
    make_format,
    split_row_groups,
    with_row_group_size,
)
from ejkernel.quantization import as_stored_scales, as_uint32_words, check_quantized, split_zeros_and_tensor_scale

# The arguments that choose a kernel elsewhere, with what leaves the choice open. They are fields of the configuration.
_TUNING_ARGUMENT_DEFAULTS = {
    "gemv_mode": "auto",
    "revsplit_k": "auto",
    "revsplit_k_parts": None,
    "fuse": True,
    "strict_fuse": None,
    "tpu_path": None,
    "allow_dense_fallback": None,
}


@document_options
def quantized_matmul(
    x: Float[Array, "*m k"],
    w: UInt32[Array, "rows words"] | Int32[Array, "rows words"],
    scales: Num[Array, "rows groups"],
    zeros: Float[Array, "rows groups"] | Float[Array, ""] | None = None,
    *,
    tensor_scale: Float[Array, ""] | None = None,
    transpose: bool = False,
    group_size: int | None = None,
    bits: int | None = None,
    mode: Mode = "affine",
    axis: str | None = None,
    precision: Any = None,
    gemv_mode: str = "auto",
    revsplit_k: str = "auto",
    revsplit_k_parts: int | None = None,
    fuse: bool = True,
    strict_fuse: bool | None = None,
    tpu_path: str | None = None,
    allow_dense_fallback: bool | None = None,
    use_best_config: bool = False,
    platform: str | None = None,
    cfg: QuantizedMatmulConfig | None = None,
    mesh: jax.sharding.Mesh | None = None,
    in_specs: Any = None,
    out_specs: Any = None,
) -> Float[Array, "*m n"]:
    """Multiplies x with a matrix of few bits (formula and formats: `ejkernel.families.quantized_matmul`).

    `ejkernel.quantization.quantize` makes the weights. Kernels dequantise in registers; where none serves the call, XLA
    makes the matrix at x's width. Sums are float32 (float64 of float64 x); of narrower x, a backend may round the
    dequantised matrix, or x times the scales, to x's dtype. The gradient of x is that of the dequantised matrix; all
    others are constants, whose gradients are zeros.

    Args:
        x: [..., K] float16, bfloat16, float32 or float64.
        w: uint32 [K, ceil(N * bits / 32)], or [N, ceil(K * bits / 32)] with `transpose`; or the same bits as int32.
        scales: [K, N / group_size], or [N, K / group_size] with `transpose`: float16, bfloat16 or float32 of affine
            codes, float32 of nf4, of mxfp4 and mxfp8 uint8 or float8_e8m0fnu, of nvfp4 and nvfp8 uint8 or
            float8_e4m3fn.
        zeros: Of the scales' shape and dtype, with `mode="affine"` alone. With nvfp4 and nvfp8 the third array of
            `quantize`, which is the tensor scale, may come here.
        tensor_scale: float32 [], the second scale of nvfp4 and nvfp8; None for 1.
        transpose: Whether the rows of w are the columns of the matrix, as `quantize(..., axis="col")` makes them.
        group_size: Neighbours in a row of w that share a scale, -1 for whole rows; None for the mode's own.
        bits: Of a code, 1 to 8 with `mode="affine"`; None for 4, or what another mode has.
        mode: "affine", "symmetric", "fp8", "nf4", "mxfp4", "mxfp8", "nvfp4" or "nvfp8".
        axis: None, or "row", with `transpose` "col": what `transpose` says already.
        precision: `jax.lax.Precision`, or its name, of the matrix products; means what it means to JAX on the device.
            None takes all digits of float32 and wider inputs, unless `jax.default_matmul_precision` says otherwise.
        gemv_mode: Tunes elsewhere. This and the next six arguments have no effect where the chosen kernel does not read
            the field of this name of `QuantizedMatmulConfig`; `explain` names them then. `platform=` chooses.
        revsplit_k: As `gemv_mode`.
        revsplit_k_parts: As `gemv_mode`.
        fuse: As `gemv_mode`.
        strict_fuse: As `gemv_mode`.
        tpu_path: As `gemv_mode`.
        allow_dense_fallback: As `gemv_mode`.
        use_best_config: Either value; tuned configurations are always taken.

    Returns:
        [..., N] in x's dtype.

    Example:
        ```python
        import jax.numpy as jnp
        from ejkernel.modules import quantized_matmul
        from ejkernel.quantization import dequantize, quantize

        weights = jnp.sin(jnp.arange(64.0 * 32)).reshape(64, 32)  # [out_features, in_features]
        w, scales, zeros = quantize(weights, group_size=32)
        output = quantized_matmul(jnp.ones((2, 32)), w, scales, zeros, group_size=32)
        assert jnp.allclose(output[0], dequantize(w, scales, zeros, group_size=32).sum(axis=1), atol=1e-4)
        ```
    """
    return run_operation(OP, locals())


class QuantizedMatmulArguments(ArgumentRecord, of=quantized_matmul):
    """The arguments of a call of `quantized_matmul`."""

    def __post_init__(self) -> None:
        form = make_format(self.mode, self.bits, self.group_size)
        transpose = as_flag("transpose", self.transpose)
        if self.axis not in (None, "col" if transpose else "row"):
            wants = "'col' or None with transpose=True, 'row' or None without"
            raise ValueError(f"axis: got {self.axis!r} with transpose={transpose}, wants {wants}")
        zeros, tensor_scale = split_zeros_and_tensor_scale(self.zeros, self.tensor_scale, form)
        set_canonical_fields(
            self,
            zeros=zeros,
            tensor_scale=tensor_scale,
            transpose=transpose,
            group_size=form.group_size,
            bits=form.bits,
            axis=None,
            precision=as_precision("precision", self.precision),
            # Means nothing: dispatch chooses the kernel, and takes the tuned configuration.
            use_best_config=as_flag("use_best_config", self.use_best_config) and False,
        )


def _configure(args: QuantizedMatmulArguments, cfg: Any) -> Any:
    """Returns the configuration with the arguments that chose a kernel: they only tune, and dispatch
    chooses it here.
    """
    chosen = {
        name: getattr(args, name)
        for name, default in _TUNING_ARGUMENT_DEFAULTS.items()
        if getattr(args, name) != default
    }
    return with_tuning_arguments(QuantizedMatmulConfig, cfg, **chosen)


def validate(args: QuantizedMatmulArguments) -> None:
    """Raises ValueError for arrays that are wrong on every backend; the record has checked the rest."""
    sizes: dict[str, int] = {}
    if not getattr(args.x, "ndim", 0) or args.x.shape[-1] == 0:
        raise ValueError(f"x: got shape {tuple(getattr(args.x, 'shape', ()))}, wants [..., K] with K of at least 1")
    check_dtype("x", args.x, jnp.floating, "a floating dtype")
    check_shape("w", args.w, "rows words", sizes)
    check_shape("scales", args.scales, "rows groups", sizes)
    form = _weight_format(args)
    check_quantized(args.w, args.scales, args.zeros, form, tensor_scale=args.tensor_scale)
    contracted = args.scales.shape[1] * form.group_size if args.transpose else args.w.shape[0]
    if args.x.shape[-1] != contracted:
        raise ValueError(
            f"x: got shape {tuple(args.x.shape)}, wants [M, {contracted}] for a matrix of {contracted} rows"
        )


def _weight_format(args: QuantizedMatmulArguments) -> Format:
    """Returns the format of a call's weights; groups of whole rows have the rows' size."""
    form = make_format(args.mode, args.bits, args.group_size)
    return with_row_group_size(form, args.w.shape[-1] * WORD_BITS // form.bits)


def lower(args: QuantizedMatmulArguments) -> Record:
    """Returns the quantised-matmul record of a call."""
    scales, zeros, form = split_row_groups(as_stored_scales(args.scales), args.zeros, _weight_format(args))
    return Record(
        x=args.x.reshape(-1, args.x.shape[-1]),
        packed=as_uint32_words(args.w),
        scales=lax.stop_gradient(scales),
        zeros=None if zeros is None else lax.stop_gradient(zeros),
        tensor_scale=None if args.tensor_scale is None else lax.stop_gradient(args.tensor_scale),
        format=form,
        transpose=args.transpose,
        precision=args.precision,
    )


def axes_of(args: QuantizedMatmulArguments) -> dict[str, str]:
    """Returns the axis letters of the arrays whose rows are columns of the matrix."""
    letters = {"w": "n w", "scales": "n q", "zeros": "n q"} if args.transpose else {}
    if args.x.ndim == 2:
        return letters
    # The first axis is the slowest of the record's rows, so that a part of it is a part of them.
    rows = " ".join(["m", *"abcdefgh"[: args.x.ndim - 2]][: args.x.ndim - 1])
    return {**letters, "x": f"{rows} k".strip(), "output": f"{rows} n".strip()}


def finish(args: QuantizedMatmulArguments, output: jax.Array) -> jax.Array:
    """Returns the output [..., N] for x [..., K]."""
    return output.reshape(*args.x.shape[:-1], output.shape[-1])


class QuantizedMatmul(Kernel[QuantizedMatmulConfig, Array]):
    """Wraps `quantized_matmul` in an object that an `Executor` can call."""


OP = Op(
    arguments=QuantizedMatmulArguments,
    family=family.FAMILY,
    validate=validate,
    lower=lower,
    cases=cases.cases(QuantizedMatmulArguments),
    tolerance=tolerances(float64=1e-11, float32=2e-5, bfloat16=2e-2, float16=3e-3),
    make_inputs=cases.make_inputs,
    axes={"x": "m k", "w": "k w", "scales": "k q", "zeros": "k q"},
    axes_of=axes_of,
    finish=finish,
    configure=_configure,
)
QuantizedMatmul.op = OP
