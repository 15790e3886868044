"""`QuantRuntimeConfig` and `runtime_config=`: dtypes count, and the choice among implementations changes nothing."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.quantization import (
    QuantizedArray,
    QuantRuntimeConfig,
    dequantize,
    prepack_quantized_array,
    prepack_quantized_weights,
    quantize,
    quantize_array,
)
from ejkernel.quantization.runtime import resolve_runtime_config

W = jax.random.normal(jax.random.key(0), (64, 96))


@pytest.mark.parametrize(("width", "dtype"), [("input", "float32"), ("fp16", "float16"), ("bf16", "bfloat16")])
def test_scales_have_the_dtype_that_a_runtime_config_says(width, dtype):
    config = QuantRuntimeConfig(affine_metadata_dtype=width)
    expected = quantize(W, 32, scale_dtype=dtype)
    prepacked = prepack_quantized_weights(W, 32, None, "affine", True, None, config)
    for arrays in (quantize(W, 32, None, "affine", "row", config), quantize(W, 32, runtime_config=config), prepacked):
        assert arrays[1].dtype == arrays[2].dtype == dtype
        jax.tree.map(np.testing.assert_array_equal, arrays, expected)


def test_scales_of_other_formats_keep_their_dtype():
    config = QuantRuntimeConfig(affine_metadata_dtype="bf16")
    for mode in ("nf4", "mxfp4", "fp8"):
        jax.tree.map(np.testing.assert_array_equal, quantize(W.T, 32, mode=mode, runtime_config=config),
                     quantize(W.T, 32, mode=mode))  # fmt: skip


def test_dequantised_weights_have_the_dtype_that_a_runtime_config_says():
    arrays, fastest = quantize(W, 32), QuantRuntimeConfig.fastest_for_backend
    for config, dtype in (
        (None, "float32"),
        (QuantRuntimeConfig(), "float32"),
        (QuantRuntimeConfig(prefer_compute_dtype="bf16", dequant_output_dtype="compute"), "bfloat16"),
        (QuantRuntimeConfig(dequant_output_dtype="fp16"), "float16"),
        (fastest(backend="tpu"), "bfloat16"),
        (fastest(backend="gpu"), "float16"),
        (fastest(keep_fp32_output=True), "float32"),
        (resolve_runtime_config(None), "float16"),
    ):
        weights = dequantize(*arrays, group_size=32, runtime_config=config)
        assert weights.dtype == dtype
        np.testing.assert_array_equal(weights, dequantize(*arrays, group_size=32, dtype=jnp.dtype(dtype)))
    assert resolve_runtime_config(config) is config


def test_a_quantised_array_keeps_its_runtime_config():
    config = QuantRuntimeConfig(affine_metadata_dtype="bf16", dequant_output_dtype="bf16")
    packed = quantize_array(W, 32, runtime_config=config)
    assert (packed.scales.dtype, packed.dequantize().dtype) == ("bfloat16", "bfloat16")
    assert packed.dequantize(runtime_config=QuantRuntimeConfig()).dtype == "float32"
    leaves, structure = jax.tree.flatten(packed)
    assert jax.tree.unflatten(structure, leaves).runtime_config == config
    assert prepack_quantized_array(W, 32, runtime_config=config).runtime_config == config
    assert QuantizedArray.from_quantized(*quantize(W, 32), group_size=32).runtime_config is None


def test_a_quantised_array_reports_its_storage():
    packed = quantize_array(W, 32, 8)
    parts = packed.data_storage_bits, packed.scales_storage_bits, packed.zeros_storage_bits
    assert parts == (8 * W.size, 16 * W.size // 32, 16 * W.size // 32)
    assert sum(parts) == packed.storage_bits == 8 * packed.storage_bytes
    assert (packed.payload_bits_per_value, packed.metadata_bits_per_value) == (8, 1)
    assert packed.effective_bits_per_value == packed.actual_bits_per_value == 9
    assert packed.storage_kib == 1024 * packed.storage_mib == packed.storage_bytes / 1024
    assert quantize_array(W.T, 32, mode="nf4").zeros_storage_bits == 0


def test_an_unknown_dtype_name_is_an_error():
    with pytest.raises(ValueError, match="affine_metadata_dtype: got 'float32', wants one of 'input', 'bf16'"):
        QuantRuntimeConfig(affine_metadata_dtype="float32")
    with pytest.raises(TypeError, match="'runtime_config' and 'scale_dtype'"):
        quantize(W, 32, runtime_config=QuantRuntimeConfig(), scale_dtype="float16")
