"""Quantised weights as one object, and a product that dequantises the matrix first."""

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from ejkernel.compat.quantization_runtime import QuantRuntimeConfig
from ejkernel.modules.operations.quantized_matmul import quantized_matmul
from ejkernel.planning.quantized_formats import Mode, make_format
from ejkernel.quantization import dequantize, quantize

__all__ = [
    "QuantizationAxis",
    "QuantizationMode",
    "QuantizedArray",
    "dense_quantized_matmul",
    "prepack_quantized_array",
    "quantize_array",
]

QuantizationMode = Mode
QuantizationAxis = Literal["row", "col"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class QuantizedArray:
    """Packed words, scales and zeros with their format: what `quantize` returns, as a pytree.

    Attributes:
        data: Packed codes.
        scales: As `quantize` returns them.
        zeros: The same: of affine codes; with nvfp4 and nvfp8 the tensor scale.
        mode: Format.
        group_size: Neighbours that share a scale.
        bits: Of a code.
        axis: `"row"` or `"col"`, as of `quantize`.
        runtime_config: Says the dtype of the dequantised weights; None for float32.

    Example:
        ```python
        import jax
        from ejkernel.quantization import quantize_array

        w = jax.random.normal(jax.random.key(0), (64, 128))  # [N, K]
        packed = quantize_array(w, group_size=32, bits=8)
        assert packed.dequantize().shape == (64, 128)
        assert packed.matmul(jax.numpy.ones((3, 128))).shape == (3, 64)
        ```
    """

    data: jax.Array
    scales: jax.Array
    zeros: jax.Array | None
    mode: Mode = dataclasses.field(metadata={"static": True})
    group_size: int = dataclasses.field(metadata={"static": True})
    bits: int = dataclasses.field(metadata={"static": True})
    axis: QuantizationAxis = dataclasses.field(default="row", metadata={"static": True})
    runtime_config: QuantRuntimeConfig | None = dataclasses.field(default=None, metadata={"static": True})

    @classmethod
    def from_quantized(
        cls,
        data: jax.Array,
        scales: jax.Array,
        zeros: jax.Array | None = None,
        *,
        group_size: int | None = None,
        bits: int | None = None,
        mode: Mode = "affine",
        axis: QuantizationAxis = "row",
        runtime_config: QuantRuntimeConfig | None = None,
    ) -> "QuantizedArray":
        """Holds what `quantize` returned; the arguments are those that it was given."""
        form = make_format(mode, bits, group_size)
        return cls(data, scales, zeros, mode, form.group_size, form.bits, axis, runtime_config)

    def as_tuple(self) -> tuple[jax.Array, ...]:
        """Returns words and scales and, where there are any, zeros."""
        return (self.data, self.scales) if self.zeros is None else (self.data, self.scales, self.zeros)

    def dequantize(self, *, runtime_config: QuantRuntimeConfig | None = None) -> jax.Array:
        """Returns the weights, as `ejkernel.quantization.dequantize`; `runtime_config` replaces the stored one."""
        config = self.runtime_config if runtime_config is None else runtime_config
        arrays = self.data, self.scales, self.zeros
        return dequantize(*arrays, self.group_size, self.bits, self.mode, self.axis, config)

    def matmul(self, x: Float[Array, "m k"], **options: Any) -> Float[Array, "m n"]:
        """Calls `quantized_matmul` with x and these weights; the options are those of `quantized_matmul`."""
        options.setdefault("transpose", self.axis == "col")
        form: dict[str, Any] = {"group_size": self.group_size, "bits": self.bits, "mode": self.mode}
        return quantized_matmul(x, self.data, self.scales, self.zeros, **form, **options)

    @property
    def logical_num_values(self) -> int:
        """Returns how many weights it holds."""
        return self.scales.size * self.group_size

    @property
    def storage_bits(self) -> int:
        """Returns bits of all its arrays."""
        return 8 * self.storage_bytes

    @property
    def data_storage_bits(self) -> int:
        """Returns bits of the packed codes."""
        return 8 * self.data.nbytes

    @property
    def scales_storage_bits(self) -> int:
        """Returns bits of the scales."""
        return 8 * self.scales.nbytes

    @property
    def zeros_storage_bits(self) -> int:
        """Returns bits of the zeros; 0 without zeros."""
        return 0 if self.zeros is None else 8 * self.zeros.nbytes

    @property
    def storage_bytes(self) -> int:
        """Returns bytes of all its arrays."""
        return sum(x.nbytes for x in self.as_tuple())

    @property
    def storage_kib(self) -> float:
        """Returns `storage_bytes` in KiB."""
        return self.storage_bytes / 2**10

    @property
    def storage_mib(self) -> float:
        """Returns `storage_bytes` in MiB."""
        return self.storage_bytes / 2**20

    @property
    def payload_bits_per_value(self) -> float:
        """Returns bits of packed codes per weight."""
        return self.data_storage_bits / self.logical_num_values

    @property
    def metadata_bits_per_value(self) -> float:
        """Returns bits of scales and zeros per weight."""
        return (self.scales_storage_bits + self.zeros_storage_bits) / self.logical_num_values

    @property
    def actual_bits_per_value(self) -> float:
        """Returns bits of storage per weight, scales and zeros included."""
        return self.storage_bits / self.logical_num_values

    @property
    def effective_bits_per_value(self) -> float:
        """Returns `actual_bits_per_value`."""
        return self.actual_bits_per_value


def quantize_array(
    w: jax.Array,
    group_size: int | None = None,
    bits: int | None = None,
    mode: Mode = "affine",
    axis: QuantizationAxis | None = None,
    runtime_config: QuantRuntimeConfig | None = None,
) -> QuantizedArray:
    """Calls `quantize` and returns its arrays as one object; `axis` is `"row"` if it is None."""
    side: QuantizationAxis = axis or "row"
    form: dict[str, Any] = {"group_size": group_size, "bits": bits, "mode": mode, "axis": side}
    arrays = quantize(w, **form, scale_dtype=runtime_config)
    return QuantizedArray.from_quantized(*arrays, **form, runtime_config=runtime_config)


def prepack_quantized_array(
    w: jax.Array,
    group_size: int | None = None,
    bits: int | None = None,
    mode: Mode = "affine",
    transpose: bool = True,
    axis: QuantizationAxis | None = None,
    runtime_config: QuantRuntimeConfig | None = None,
) -> QuantizedArray:
    """Calls `prepack_quantized_weights` and returns its arrays as one object."""
    side: QuantizationAxis = axis or ("row" if transpose else "col")
    return quantize_array(w, group_size, bits, mode, side, runtime_config)


def dense_quantized_matmul(
    x: Float[Array, "m k"],
    w: jax.Array,
    scales: jax.Array,
    zeros: jax.Array | None = None,
    transpose: bool = False,
    group_size: int | None = None,
    bits: int | None = None,
    mode: Mode = "affine",
    axis: QuantizationAxis | None = None,
    align_multiple: int | None = None,
) -> Float[Array, "m n"]:
    """Returns x times the dequantised matrix, which is made at x's width; `align_multiple` changes nothing."""
    side = axis or ("col" if transpose else "row")
    matrix = dequantize(w, scales, zeros, group_size, bits, mode, side, x.dtype)
    return jnp.matmul(x, matrix.T, preferred_element_type=jnp.float32).astype(x.dtype)
