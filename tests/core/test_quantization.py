"""Quantised weights of every size: the error is bounded for all finite weights, or the call is refused by name."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ejkernel.modules import grouped_matmul, quantized_matmul
from ejkernel.planning.quantized_formats import (
    E2M1_MAGNITUDES,
    MAX_ZERO_POINTS,
    MODES,
    NF4,
    integer_scales,
    make_format,
)
from ejkernel.quantization import dequantize, quantize

GROUP = 32
E4M3 = np.arange(128, dtype=np.uint8).view(jnp.float8_e4m3fn).astype(np.float64)[:127]
CODES = {
    "fp8": E4M3,
    "nf4": np.array(NF4),
    "mxfp4": np.array(E2M1_MAGNITUDES),
    "nvfp4": np.array(E2M1_MAGNITUDES),
    "mxfp8": E4M3,
    "nvfp8": E4M3,
}
MIN_NORMAL = 2.0**-126
REFUSAL = r"scale_dtype: got float16 for weights that need scales of \S+, wants float32"


@functools.cache
def round_trip(mode, bits=None, dtype=None):
    """Quantises and dequantises, compiled once for a format."""

    def run(w):
        made = quantize(w, GROUP, bits, mode, "col", dtype)
        return (*made, dequantize(*made, group_size=GROUP, bits=bits, mode=mode, axis="col"))

    return jax.jit(run)


@st.composite
def weights(draw):
    """Three rows of two groups each: spread around a mean, constant, or zero, of any magnitude of float32."""
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    rows = []
    for _ in range(3):
        size = 10.0 ** draw(st.floats(-38, 38))
        mean = draw(st.sampled_from([0.0, 1.0, -30.0, 1e3, -1e6, 1e9]))
        kind = draw(st.sampled_from(["normal", "constant", "zero"]))
        row = {"normal": random.normal(size=2 * GROUP) + mean, "constant": np.full(2 * GROUP, mean + 1)}
        rows.append(np.clip(size * row.get(kind, np.zeros(2 * GROUP)), -3.4e38, 3.4e38))
    return np.array(rows, np.float32)


def exact_scales(mode, scales, tensor_scale=None):
    """Scales as their format defines them, in float64."""
    stored = np.asarray(scales)
    if mode.startswith("mx"):
        return 2.0 ** (stored.astype(np.float64) - 127)
    if mode.startswith("nv"):
        return stored.view(jnp.float8_e4m3fn).astype(np.float64) * float(tensor_scale)
    return stored.astype(np.float64)


def steps_near(groups, scales, mode):
    """How far apart the two codes next to each weight are."""
    codes = CODES[mode]
    magnitudes = groups / scales if mode == "nf4" else np.abs(groups) / scales
    above = np.searchsorted(codes, magnitudes).clip(1, len(codes) - 1)
    return scales * (codes[above] - codes[above - 1])


@pytest.mark.parametrize(("bits", "dtype"), [(4, "float32"), (8, "float32"), (1, "float32"), (4, "bfloat16")])
@settings(max_examples=25, deadline=None)
@given(weights())
@example(np.full((3, 64), 1e5, np.float32))
@example(np.full((3, 64), 1e-38, np.float32))
@example(np.tile(np.array([-3.4e38, 3.4e38], np.float32), (3, 32)))
def test_affine_weights_of_every_size_are_within_half_a_step(bits, dtype, w):
    if bits == 1:
        w = w * np.float32(0.49)  # two codes of 1 bit are up to twice the largest weight apart
    _, scales, zeros, back = (np.asarray(x, np.float64) for x in round_trip("affine", bits, dtype)(w))
    groups = np.asarray(w, np.float64).reshape(len(w), -1, GROUP)
    largest = np.abs(groups).max(-1)
    needed = np.maximum(np.ptp(groups, -1) / (2**bits - 1), largest / MAX_ZERO_POINTS[dtype])
    assert np.isfinite(zeros).all()
    # Subnormal weights may count as zeros, of which the scale is 1.
    assert (scales <= np.where(largest < MIN_NORMAL, 1, np.maximum(needed * (1 + 2.0**-6), MIN_NORMAL))).all()
    error = np.abs(back - w).reshape(groups.shape)
    # Half a step, or a whole one at the end of float32, and what rounding adds in the quantiser and the dequantiser.
    steps = scales[..., None] * np.where(np.abs(groups) > 3e38, 1, 0.5)
    assert (error <= 1.002 * steps + np.abs(groups) * 2.0**-22 + MIN_NORMAL).all()


@settings(max_examples=25, deadline=None)
@given(weights())
@example(np.full((3, 64), -3.4e38, np.float32))
def test_symmetric_weights_of_every_size_are_within_half_a_step(w):
    _, scales, back = (np.asarray(x, np.float64) for x in round_trip("symmetric", 4, "float32")(w))
    groups = np.asarray(w, np.float64).reshape(len(w), -1, GROUP)
    needed = np.maximum(-groups.min(-1) / 8, groups.max(-1) / 7)
    assert (scales <= np.where(np.abs(groups).max(-1) < MIN_NORMAL, 1, np.maximum(needed * 1.0001, MIN_NORMAL))).all()
    steps = scales[..., None] * np.where(np.abs(groups) > 3e38, 1, 0.5)
    error = np.abs(back - w).reshape(groups.shape)
    assert (error <= 1.002 * steps + np.abs(groups) * 2.0**-22 + MIN_NORMAL).all()


@settings(max_examples=25, deadline=None)
@given(weights())
def test_float16_scales_hold_the_weights_or_refuse_them_by_name(w):
    steps = integer_scales(jnp.asarray(w).reshape(3, 2, GROUP), make_format("affine", 4, GROUP), "float16").max()
    if steps != 0 and not 2.0**-22 <= steps <= 65504:
        with pytest.raises(ValueError, match=REFUSAL):
            quantize(w, GROUP, axis="col")
        return
    _, scales, _ = made = quantize(w, GROUP, axis="col")
    error = np.abs(np.asarray(dequantize(*made, group_size=GROUP, axis="col"), np.float64) - w)
    assert (error <= 0.501 * np.repeat(np.asarray(scales, np.float64), GROUP, axis=1) + np.abs(w) * 2.0**-22).all()


@pytest.mark.parametrize("size", [1e-9, 1e8])
def test_weights_that_float16_scales_do_not_hold_are_refused(size):
    w = jax.random.normal(jax.random.key(0), (4, 64)) * size
    with pytest.raises(ValueError, match=REFUSAL):
        quantize(w, axis="col")
    back = dequantize(*quantize(w, axis="col", scale_dtype=jnp.float32), axis="col")
    assert float(jnp.abs(back - w).max()) < 0.2 * size


@pytest.mark.parametrize("mean", [0.0, 3.0, -1e3, 1e5])
def test_a_mean_far_from_zero_costs_no_more_than_float16_digits(mean):
    w = mean + jax.random.normal(jax.random.key(0), (4, 64))
    back = dequantize(*quantize(w, axis="col"), axis="col")
    assert float(jnp.abs(back - w).max()) <= max(0.25, abs(mean) * 2.0**-12 * 1.01)


@pytest.mark.parametrize("mode", CODES)
@settings(max_examples=25, deadline=None)
@given(weights())
@example(np.full((3, 64), 1e-38, np.float32))
@example(np.full((3, 64), 3.4e38, np.float32))
def test_floating_codes_of_every_size_are_within_a_step(mode, w):
    _, scales, *third, back = round_trip(mode)(w)
    groups, scales = np.asarray(w, np.float64).reshape(3, 2, GROUP), exact_scales(mode, scales, *third)[..., None]
    largest = np.abs(groups).max(-1, keepdims=True)
    # A scale is as small as it can be: next to a group that is far larger, the smallest of e4m3.
    smallest = 2.0**-9 * float(third[0]) if third else MIN_NORMAL
    needed = largest / CODES[mode].max()
    assert (
        scales[needed >= smallest] <= (needed * (2 if mode.startswith("mx") else 9 / 8 + 0.01))[needed >= smallest]
    ).all()
    # Half a step; a whole one, where rounding up would leave the range of float32.
    steps = steps_near(groups, scales, mode) * np.where(largest > 3e38, 1, 0.5)
    error = np.abs(np.asarray(back, np.float64).reshape(groups.shape) - groups)
    assert (error <= 1.001 * steps + np.abs(groups) * 2.0**-22 + 3 * MIN_NORMAL).all()


@pytest.mark.parametrize("mode", ["nvfp4", "nvfp8"])
@pytest.mark.parametrize("size", [1e-30, 1e-4, 1.0, 1e30])
def test_the_tensor_scale_makes_every_size_as_exact_as_1(mode, size):
    w = jax.random.normal(jax.random.key(0), (2, 16, 64))
    made = quantize(w * size, mode=mode)
    assert [x.shape for x in made[1:]] == [(2, 64, 1), (2,)]
    back = dequantize(*made, mode=mode) / size
    error = float(jnp.linalg.norm(back - w) / jnp.linalg.norm(w))
    assert error < (0.12 if mode == "nvfp4" else 0.035)


def test_rows_of_other_sizes_than_the_largest_keep_their_digits():
    w = jax.random.normal(jax.random.key(0), (3, 64)) * jnp.array([[1.0], [1e-2], [1e-3]])
    back = dequantize(*quantize(w, mode="nvfp4", axis="col"), mode="nvfp4", axis="col")
    errors = jnp.linalg.norm(back - w, axis=1) / jnp.linalg.norm(w, axis=1)
    assert float(errors.max()) < 0.13


@pytest.mark.parametrize(
    ("w", "said"),
    [
        (jnp.full((16, 64), jnp.nan), "w: got values that are not finite in float32"),
        (np.full((16, 64), 1e300), "w: got values that are not finite in float32"),
    ],
)
def test_weights_that_are_not_finite_are_refused(w, said):
    with pytest.raises(ValueError, match=said):
        quantize(w, 16)


def test_other_dtypes_of_scales_are_refused_by_name():
    with pytest.raises(ValueError, match="scale_dtype: got float64, wants float16 or bfloat16 or float32 for affine"):
        quantize(jnp.ones((64, 64)), scale_dtype="float64")
    with pytest.raises(ValueError, match="scale_dtype: got float16, wants uint8 for mxfp4"):
        quantize(jnp.ones((64, 64)), mode="mxfp4", scale_dtype="float16")


E8M0 = np.array([0, 1, 120, 127, 133, 254], np.uint8)


def mx(mode):
    """One row for each byte of `E8M0`: all codes of a group, and their values in float64."""
    codes = np.arange(32, dtype=np.uint8) % 16 if mode == "mxfp4" else np.arange(32, dtype=np.uint8) * 3 + 20
    values = np.array([*E2M1_MAGNITUDES, *(-x for x in E2M1_MAGNITUDES)])[codes] if mode == "mxfp4" else E4M3[codes]
    bits = 4 if mode == "mxfp4" else 8
    stream = sum(int(code) << (bits * i) for i, code in enumerate(codes))
    words = np.array([(stream >> (32 * i)) & 0xFFFFFFFF for i in range(bits)], np.uint32)
    packed = np.tile(words, (len(E8M0), 1))
    return packed, E8M0[:, None], values * 2.0 ** (E8M0.astype(np.float64)[:, None] - 127)


@pytest.mark.parametrize("as_dtype", [np.uint8, jnp.float8_e8m0fnu])
@pytest.mark.parametrize("mode", ["mxfp4", "mxfp8"])
def test_byte_b_of_a_shared_scale_is_two_to_the_b_minus_127(mode, as_dtype):
    packed, scales, values = mx(mode)
    back = np.asarray(dequantize(jnp.asarray(packed), jnp.asarray(scales.view(as_dtype)), mode=mode, axis="col"))
    with np.errstate(over="ignore"):
        values = values.astype(np.float32)
    # Devices may flush what is subnormal in float32, and do not flush anything else.
    np.testing.assert_array_equal(back, np.where(np.abs(values) < MIN_NORMAL, 0, values))


@pytest.mark.parametrize("mode", ["mxfp4", "mxfp8"])
def test_byte_255_of_a_shared_scale_is_nan(mode):
    packed, _, _ = mx(mode)
    scales = jnp.full((len(packed), 1), 255, jnp.uint8)
    assert bool(jnp.isnan(dequantize(jnp.asarray(packed), scales, mode=mode, axis="col")).all())


def test_quantize_writes_shared_scales_as_checkpoints_do():
    values = jnp.tile(jnp.array([0.5, -1.5, 6.0, -4.0, 3.0, 2.0, -1.0, 0.0]), (2, 4)) * 0.125
    packed, scales = quantize(values, mode="mxfp4", axis="col")
    assert (scales.dtype, scales.tolist()) == (jnp.uint8, [[124], [124]])
    np.testing.assert_array_equal(dequantize(packed, scales, mode="mxfp4", axis="col"), values)


@pytest.mark.parametrize("mode", MODES)
def test_what_quantize_returns_is_what_the_operations_take(mode):
    w, x = jax.random.normal(jax.random.key(0), (3, 48, 64)) * 0.1, jax.random.normal(jax.random.key(1), (7, 64))
    made = quantize(w, 16, mode=mode, axis="col")
    dense = dequantize(*made, group_size=16, mode=mode, axis="col")
    one = tuple(array[0] for array in made)
    options = {"group_size": 16, "mode": mode, "transpose": True}
    np.testing.assert_allclose(quantized_matmul(x, *one, **options), x @ dense[0].T, rtol=1e-5, atol=1e-5)
    as_int32 = (jax.lax.bitcast_convert_type(one[0], jnp.int32), *one[1:])
    np.testing.assert_allclose(quantized_matmul(x, *as_int32, **options), x @ dense[0].T, rtol=1e-5, atol=1e-5)
    third = {"rhs_zeros": made[2]} if len(made) > 2 else {}
    sizes, options = jnp.array([3, 0, 4]), {"rhs_mode": mode, "rhs_group_size": 16, "transpose_rhs": True}
    got = grouped_matmul(x, made[0], sizes, rhs_scale=made[1], **third, **options)
    np.testing.assert_allclose(got, grouped_matmul(x, dense, sizes, transpose_rhs=True), rtol=1e-5, atol=1e-5)


def test_the_tensor_scale_is_a_factor_of_output_and_gradient():
    w, x = jax.random.normal(jax.random.key(0), (48, 64)) * 1e-3, jax.random.normal(jax.random.key(1), (7, 64))
    packed, scales, tensor_scale = quantize(w, mode="nvfp4")
    call = functools.partial(quantized_matmul, w=packed, scales=scales, mode="nvfp4")
    for run in (call, jax.grad(lambda x, **kw: jnp.sum(jnp.sin(1e-3 * call(x, **kw))))):
        got, plain = run(x, tensor_scale=jnp.float32(1.0)), run(x)
        np.testing.assert_array_equal(got, plain)
    np.testing.assert_allclose(call(x, tensor_scale=tensor_scale), call(x) * tensor_scale, rtol=1e-6)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"tensor_scale": jnp.ones(2)}, r"tensor_scale: got float32\[2\], wants float32\[\], one per matrix"),
        ({"tensor_scale": jnp.ones((), jnp.bfloat16)}, r"tensor_scale: got bfloat16\[\], wants float32\[\]"),
        ({"mode": "mxfp4", "tensor_scale": jnp.ones(())}, "tensor_scale: got an array with mode 'mxfp4', wants None"),
        ({"scales": jnp.ones((64, 3), jnp.float8_e8m0fnu)}, "got dtype float8_e8m0fnu, wants uint8 or float8_e4m3fn"),
    ],
)
def test_tensor_scales_that_do_not_fit_are_refused_by_name(change, said):
    packed, scales, _ = quantize(jnp.ones((48, 64)), mode="nvfp4")
    arguments = {"w": packed, "scales": scales, "mode": "nvfp4", "group_size": 16, **change}
    with pytest.raises(ValueError, match=said):
        quantized_matmul(jnp.ones((2, 64)), **arguments)
