"""Weights of quantised checkpoints: what the operations compute with them, against each format's layout in NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.modules import grouped_matmul, quantized_matmul
from ejkernel.quantization import (
    dequantize,
    from_awq,
    from_compressed_tensors,
    from_fp8_blocks,
    from_gptq,
    from_mxfp4,
    from_nvfp4,
    quantize,
)

N, K, GROUP = 32, 128, 32
RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(3, K)).astype(np.float32)
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
AWQ = (0, 2, 4, 6, 1, 3, 5, 7)


def codes_of(bits, *shape):
    return RANDOM.integers(0, 2**bits, shape)


def scales_of(*shape, dtype=np.float16):
    return np.asarray(jnp.asarray(RANDOM.uniform(0.01, 0.1, shape), dtype))


def stream(codes, bits, axis):
    """int32 words of codes along an axis, one bit after another."""
    rows = np.moveaxis(codes, axis, -1)
    digits = (rows[..., None] >> np.arange(bits)) & 1
    digits = digits.reshape(*rows.shape[:-1], -1, 32).astype(np.uint64)
    words = (digits << np.arange(32, dtype=np.uint64)).sum(-1).astype(np.uint32).view(np.int32)
    return np.moveaxis(words, -1, axis)


def assert_computes(arguments, weights, x=X):
    """`quantized_matmul` computes x times the weights [N, K]."""
    got = quantized_matmul(x, **arguments)
    np.testing.assert_allclose(got, x.astype(np.float64) @ np.asarray(weights, np.float64).T, rtol=2e-5, atol=2e-5)


def each_group(values, size, axis=-1):
    return np.repeat(np.asarray(values, np.float64), size, axis)


@pytest.mark.parametrize(("bits", "version"), [(4, "gptq"), (4, "gptq_v2"), (8, "gptq"), (3, "gptq_v2"), (2, "gptq")])
def test_gptq(bits, version):
    codes, scales = codes_of(bits, K, N), scales_of(K // GROUP, N)
    zeros = codes_of(bits, K // GROUP, N)
    stored = zeros if version == "gptq_v2" else (zeros - 1) & (2**bits - 1)
    weights = (codes - each_group(zeros, GROUP, 0)) * each_group(scales, GROUP, 0)
    tensors = stream(codes, bits, 0), stream(stored, bits, 1), jnp.asarray(scales)
    arguments = from_gptq(*map(jnp.asarray, tensors), jnp.arange(K) // GROUP, bits=bits, checkpoint_format=version)
    assert_computes(arguments, weights.T)
    with pytest.raises(ValueError, match="g_idx: got groups out of order"):
        from_gptq(*map(jnp.asarray, tensors), jnp.arange(K) % (K // GROUP), bits=bits)


def test_gptq_with_one_group():
    codes, scales, zeros = codes_of(4, K, N), scales_of(1, N, dtype=jnp.bfloat16), codes_of(4, 1, N)
    tensors = stream(codes, 4, 0), stream(zeros, 4, 1), scales
    arguments = from_gptq(*map(jnp.asarray, tensors), checkpoint_format="gptq_v2")
    assert arguments["group_size"] == -1
    assert_computes(arguments, ((codes - zeros) * scales.astype(np.float64)).T)


def awq_words(codes):
    return stream(codes.reshape(*codes.shape[:-1], -1, 8)[..., AWQ].reshape(codes.shape), 4, -1)


def test_awq():
    codes, scales, zeros = codes_of(4, K, N), scales_of(K // GROUP, N), codes_of(4, K // GROUP, N)
    weights = (codes - each_group(zeros, GROUP, 0)) * each_group(scales, GROUP, 0)
    assert_computes(from_awq(*map(jnp.asarray, (awq_words(codes), awq_words(zeros), scales))), weights.T)


@pytest.mark.parametrize("convert", [from_gptq, from_awq])
@pytest.mark.parametrize("axis", [0, 1])
def test_packed_zeros_of_other_groups_or_columns_are_refused(convert, axis):
    codes, zeros = codes_of(4, K, N), codes_of(4, K // GROUP, N)
    words = stream(codes, 4, 0 if convert is from_gptq else 1)
    short = jnp.asarray(np.delete(stream(zeros, 4, 1), 0, axis))
    with pytest.raises(ValueError, match=r"qzeros: got shape \(.*\), wants \(.*\) for scales of shape"):
        convert(jnp.asarray(words), short, jnp.asarray(scales_of(K // GROUP, N)))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("groups", [1, K // GROUP])
def test_compressed_tensors_symmetric(groups, dtype):
    codes, scales = codes_of(4, N, K), scales_of(N, groups, dtype=dtype)
    tensors = {"weight_packed": stream(codes, 4, 1), "weight_scale": scales, "weight_shape": np.array([N, K])}
    arguments = from_compressed_tensors({name: jnp.asarray(value) for name, value in tensors.items()})
    assert_computes(arguments, (codes - 8) * each_group(scales, K // groups))


def test_compressed_tensors_asymmetric_and_int8():
    codes, scales, zeros = codes_of(4, N, K), scales_of(N, 4), codes_of(4, N, 4)
    tensors = {"weight_packed": stream(codes, 4, 1), "weight_scale": scales, "weight_zero_point": stream(zeros, 4, 0)}
    arguments = from_compressed_tensors({name: jnp.asarray(value) for name, value in tensors.items()})
    assert_computes(arguments, (codes - each_group(zeros, GROUP)) * each_group(scales, GROUP))
    signed = RANDOM.integers(-128, 128, (N, K)).astype(np.int8)
    arguments = from_compressed_tensors({"weight": jnp.asarray(signed), "weight_scale": jnp.asarray(scales[:, :1])})
    assert_computes(arguments, signed * scales[:, :1].astype(np.float64))


def float8(*shape):
    return np.asarray(jnp.asarray(RANDOM.normal(size=shape), jnp.float8_e4m3fn))


@pytest.mark.parametrize("shape", [(N, 1), (1,), ()])
def test_compressed_tensors_float8(shape):
    weight, scales = float8(N, K), scales_of(*shape, dtype=np.float32)
    arguments = from_compressed_tensors({"weight": jnp.asarray(weight), "weight_scale": jnp.asarray(scales)})
    assert_computes(arguments, weight.astype(np.float64) * scales)


def nibbles(codes):
    return (codes[..., 0::2] | codes[..., 1::2] << 4).astype(np.uint8)


@pytest.mark.parametrize("as_dtype", [np.uint8, jnp.float8_e8m0fnu])
def test_mxfp4_of_experts(as_dtype):
    codes, scales = codes_of(4, 2, N, K), RANDOM.integers(120, 130, (2, N, K // 32)).astype(np.uint8)
    weights = E2M1[codes] * each_group(2.0 ** (scales.astype(np.float64) - 127), 32)
    blocks = nibbles(codes).reshape(2, N, K // 32, 16)
    stored = jnp.asarray(scales.view(as_dtype))
    assert_computes(from_mxfp4(jnp.asarray(blocks[0]), stored[0]), weights[0])
    got = grouped_matmul(X, group_sizes=jnp.array([1, 2]), **from_mxfp4(jnp.asarray(blocks), stored))
    want = np.concatenate([X[:1] @ weights[0].T, X[1:] @ weights[1].T])
    np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-5)
    tensors = {"weight_packed": jnp.asarray(nibbles(codes[0])), "weight_scale": stored[0]}
    assert_computes(from_compressed_tensors(tensors), weights[0])


def test_nvfp4():
    codes, scales = codes_of(4, N, K), np.abs(float8(N, K // 16))
    weights = E2M1[codes] * each_group(scales, 16) * 0.003
    packed, stored = jnp.asarray(nibbles(codes)), jnp.asarray(scales)
    assert_computes(from_nvfp4(packed, stored, jnp.float32(0.003)), weights)
    assert_computes(from_nvfp4(packed, stored), weights / 0.003)
    names = {"weight_packed": packed, "weight_scale": stored, "weight_global_scale": jnp.array([1 / 0.003])}
    assert_computes(from_compressed_tensors(names), weights)
    experts = from_nvfp4(packed[None], stored[None], jnp.array([0.003]))
    got = grouped_matmul(X, group_sizes=jnp.array([3]), **experts)
    np.testing.assert_allclose(got, X @ weights.T, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize(
    ("convert", "name", "size"), [(from_mxfp4, "scales", 32), (from_nvfp4, "weight_scale", 16)], ids=["mxfp4", "nvfp4"]
)
def test_scales_of_other_rows_are_refused(convert, name, size):
    codes, scales = jnp.zeros((N, K // 2), jnp.uint8), jnp.zeros((N - 1, K // size), jnp.uint8)
    with pytest.raises(ValueError, match=rf"{name}: got shape \(31, {K // size}\), wants \[32, K / {size}\]"):
        convert(codes, scales)


def test_float8_in_blocks():
    weight, scales = float8(2, 160, 256), scales_of(2, 2, 2, dtype=np.float32)
    x = RANDOM.normal(size=(3, 256)).astype(np.float32)
    weights = weight.astype(np.float64) * each_group(each_group(scales, 128), 128, 1)[:, :160]
    assert_computes(from_fp8_blocks(jnp.asarray(weight[0]), jnp.asarray(scales[0])), weights[0], x)
    experts = from_fp8_blocks(jnp.asarray(weight), jnp.asarray(scales))
    got = grouped_matmul(x, group_sizes=jnp.array([1, 2]), **experts)
    want = np.concatenate([x[:1] @ weights[0].T, x[1:] @ weights[1].T])
    np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-5)
    with pytest.raises(ValueError, match=r"weight_scale_inv: got shape \(2, 2\), wants \[..., 2, 1\]"):
        from_fp8_blocks(jnp.asarray(weight[0, :, :128]), jnp.asarray(scales[0]))


@pytest.mark.parametrize("shape", [(K,), (2, 3, K), (2, 1, 3, K), (0, 3, K)])
@pytest.mark.parametrize("axis", ["row", "col"])
def test_rows_of_any_rank_and_groups_of_whole_rows(shape, axis):
    weights = jnp.asarray(RANDOM.normal(size=(64, K)), jnp.float32)
    made = quantize(weights, -1, axis=axis)
    dense = dequantize(*made, group_size=-1, axis=axis)
    x = jnp.asarray(RANDOM.normal(size=shape), jnp.float32)

    def call(x):
        return quantized_matmul(x, *made, group_size=-1, transpose=axis == "col")

    assert call(x).shape == (*shape[:-1], 64)
    np.testing.assert_allclose(call(x), x @ dense.T, rtol=2e-5, atol=2e-5)
    assert jax.eval_shape(jax.grad(lambda x: call(x).sum()), x).shape == shape


def test_rows_of_any_rank_over_devices():
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("dp",))
    made = quantize(jnp.asarray(RANDOM.normal(size=(64, K)), jnp.float32), axis="col")
    x = jnp.asarray(RANDOM.normal(size=(2, 3, K)), jnp.float32)
    spec = jax.sharding.PartitionSpec("dp")
    specs = {"mesh": mesh, "in_specs": (spec, None, None, None), "out_specs": spec}
    got = quantized_matmul(x, *made, transpose=True, **specs)
    np.testing.assert_allclose(got, quantized_matmul(x, *made, transpose=True), rtol=1e-5, atol=1e-5)


def test_groups_of_whole_rows_are_refused_where_rows_are_no_multiple_of_32():
    with pytest.raises(ValueError, match="group_size: got -1 with rows of 48 codes, wants rows in multiples of 32"):
        quantize(jnp.ones((64, 48)), -1, axis="col")


@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn"])
@pytest.mark.parametrize("axes", [(64,), (64, 1), (2,), (2, 1), (2, 64), (2, 64, 1)])
def test_scales_of_rows_and_experts_mean_the_same_with_and_without_axes_of_1(dtype, axes):
    experts = axes[0] == 2
    shape = (2, 64, 128) if experts else (64, 128)
    weight = jax.random.randint(jax.random.key(0), shape, -8, 9).astype(dtype)
    scale = jnp.arange(1.0, 1 + np.prod(axes)).reshape(axes)
    dense = weight.astype(jnp.float32) * scale.reshape(*axes, *(1,) * (len(shape) - len(axes)))
    arguments = from_compressed_tensors({"weight": weight, "weight_scale": scale}, bits=8)
    if experts:
        x, sizes = jax.random.normal(jax.random.key(1), (5, 128)), jnp.array([2, 3])
        got = grouped_matmul(x, group_sizes=sizes, **arguments)
        want = jnp.concatenate([x[:2] @ dense[0].T, x[2:] @ dense[1].T])
    else:
        x = jax.random.normal(jax.random.key(1), (3, 128))
        got, want = quantized_matmul(x, **arguments), x @ dense.T
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4 * np.abs(want).max())


@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn"])
def test_scales_of_no_rows_are_refused(dtype):
    tensors = {"weight": jnp.zeros((64, 128), dtype), "weight_scale": jnp.ones(32)}
    with pytest.raises(ValueError, match=r"weight_scale: got shape \(32,\), wants \[64, groups\]"):
        from_compressed_tensors(tensors, bits=8)


def test_tensor_scales_of_other_experts_are_refused():
    weight, scale = jnp.zeros((2, 64, 64), jnp.uint8), jnp.zeros((2, 64, 8), jnp.uint8)
    with pytest.raises(ValueError, match=r"weight_scale_2: got shape \(3,\), wants one element, or \[2\]"):
        from_nvfp4(weight, scale, jnp.ones(3))
