"""Names of `ejkernel.quantization.runtime`: dtypes of scales and of dequantised weights, in one object."""

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal, get_args, get_type_hints

import jax
import jax.numpy as jnp

__all__ = ["QuantRuntimeConfig", "resolve_runtime_config"]

FloatDtypeName = Literal["bf16", "fp16", "fp32"]
DTYPE_BY_NAME = {"bf16": jnp.bfloat16, "fp16": jnp.float16, "fp32": jnp.float32}


@dataclasses.dataclass(frozen=True)
class QuantRuntimeConfig:
    """Dtypes of scales and of dequantised weights, for `runtime_config=` of `quantize` and `dequantize`.

    The fields that choose among implementations change nothing here: there is one for each format.

    Attributes:
        enable_u4_u8_fastpath: Changes nothing.
        enable_threshold_codebook: Changes nothing.
        enable_parity_fallback: Changes nothing.
        strict_shape_alignment: Changes nothing; shapes are always checked.
        prefer_compute_dtype: Dtype of the dequantised weights with `dequant_output_dtype="compute"`. The arithmetic is
            that of float32.
        affine_metadata_dtype: Dtype of affine scales and zeros; "input" is that of the weights. Other formats keep
            their own.
        dequant_output_dtype: Dtype of the dequantised weights.
        dequant_unpack_policy: Changes nothing.
        minifloat_decode_policy: Changes nothing.

    Example:
        ```python
        import jax
        from ejkernel.quantization import QuantRuntimeConfig, dequantize, quantize

        w = jax.random.normal(jax.random.key(0), (64, 128))  # [N, K]
        config = QuantRuntimeConfig(affine_metadata_dtype="fp32", dequant_output_dtype="bf16")
        packed, scales, zeros = quantize(w, runtime_config=config)
        assert scales.dtype == "float32"
        assert dequantize(packed, scales, zeros, runtime_config=config).dtype == "bfloat16"
        ```
    """

    enable_u4_u8_fastpath: bool = True
    enable_threshold_codebook: bool = True
    enable_parity_fallback: bool = False
    strict_shape_alignment: bool = True
    prefer_compute_dtype: FloatDtypeName = "fp32"
    affine_metadata_dtype: Literal["input", FloatDtypeName] = "input"
    dequant_output_dtype: Literal["compute", FloatDtypeName] = "fp32"
    dequant_unpack_policy: Literal["auto", "fast", "generic"] = "auto"
    minifloat_decode_policy: Literal["auto", "table", "arith"] = "auto"

    def __post_init__(self) -> None:
        for name, kind in get_type_hints(type(self)).items():
            choices, value = get_args(kind), getattr(self, name)
            if choices and value not in choices:
                raise ValueError(f"{name}: got {value!r}, wants one of {', '.join(map(repr, choices))}")

    @classmethod
    def fastest_for_backend(cls, *, backend: str | None = None, keep_fp32_output: bool = False) -> "QuantRuntimeConfig":
        """Returns a configuration with dtypes of 16 bits: bfloat16 on a TPU, float16 elsewhere.

        Args:
            backend: Name of a JAX backend; None for the default one.
            keep_fp32_output: Whether dequantised weights are float32.
        """
        width: FloatDtypeName = "bf16" if (backend or jax.default_backend()).lower() == "tpu" else "fp16"
        return cls(
            prefer_compute_dtype=width,
            affine_metadata_dtype=width,
            dequant_output_dtype="fp32" if keep_fp32_output else "compute",
        )

    @property
    def output_dtype(self) -> Any:
        """Returns the dtype of dequantised weights."""
        width = self.dequant_output_dtype
        return DTYPE_BY_NAME[self.prefer_compute_dtype if width == "compute" else width]

    def scale_dtype(self, weights_dtype: Any, quantization_mode: str, supported_dtypes: Sequence[str]) -> Any:
        """Returns the dtype of scales; None for the format's own.

        Args:
            weights_dtype: Dtype of the weights.
            quantization_mode: Format of the codes.
            supported_dtypes: Dtypes that scales of the format may have.
        """
        if quantization_mode != "affine":
            return None
        width = self.affine_metadata_dtype
        name = jnp.dtype(weights_dtype if width == "input" else DTYPE_BY_NAME[width]).name
        return name if name in supported_dtypes else "float32"


def resolve_runtime_config(config: QuantRuntimeConfig | None) -> QuantRuntimeConfig:
    """Returns the configuration; for None the one of `fastest_for_backend`."""
    return QuantRuntimeConfig.fastest_for_backend() if config is None else config
