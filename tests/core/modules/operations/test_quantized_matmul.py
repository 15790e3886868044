"""Weights of few bits: how codes lie in words, what they mean, and products with them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ejkernel
from ejkernel.modules import grouped_matmul, quantized_matmul
from ejkernel.planning.quantized_formats import MODES, pack, unpack
from ejkernel.quantization import dequantize, prepack_quantized_weights, quantize

WEIGHTS = jax.random.normal(jax.random.key(0), (96, 64))


@pytest.mark.parametrize("bits", range(1, 9))
def test_codes_are_packed_in_order_without_gaps(bits):
    codes = np.random.default_rng(0).integers(0, 2**bits, (3, 48), dtype=np.uint8)
    packed = np.asarray(pack(jnp.asarray(codes), bits))
    assert packed.shape == (3, -(-48 * bits // 32))
    assert packed.dtype == np.uint32
    for row, words in zip(codes, packed, strict=True):
        stream = sum(int(word) << (32 * i) for i, word in enumerate(words))
        assert [(stream >> (i * bits)) & (2**bits - 1) for i in range(48)] == row.tolist()
    np.testing.assert_array_equal(unpack(jnp.asarray(packed), bits, 48), codes)


@pytest.mark.parametrize("axis", ["row", "col"])
@pytest.mark.parametrize("mode", MODES)
def test_a_round_trip_gives_the_weights_back_not_their_transpose(mode, axis):
    group = 16 if mode.startswith("nv") else 32
    back = dequantize(*quantize(WEIGHTS, group, mode=mode, axis=axis), mode=mode, group_size=group, axis=axis)
    assert back.shape == WEIGHTS.shape
    error = float(jnp.linalg.norm(back - WEIGHTS) / jnp.linalg.norm(WEIGHTS))
    # Half a step of the format, of about the largest of a group: 8 bits with a good scale, 8 with a scale of 3 digits
    # below its smallest normal, and 4 bits.
    assert error < {"mxfp8": 0.04, "nvfp8": 0.05}.get(mode, 0.14)


@pytest.mark.parametrize("bits", range(1, 9))
def test_affine_codes_are_within_half_a_step(bits):
    packed, scales, zeros = quantize(WEIGHTS, 32, bits, axis="col")
    back = dequantize(packed, scales, zeros, 32, bits, axis="col")
    step = jnp.repeat(scales.astype(jnp.float32), 32, axis=1)
    # Zeros are stored with 11 bits.
    allowed = (
        step * (0.5 + jnp.repeat(jnp.abs(zeros.astype(jnp.float32)), 32, axis=1) * 2**-11) + 2**-11 * step * 2**bits
    )
    assert bool((jnp.abs(back - WEIGHTS) <= allowed * 1.001).all())


@pytest.mark.parametrize("mode", MODES)
def test_groups_of_one_value_and_of_zeros_come_back_exactly(mode):
    group = 16 if mode.startswith("nv") else 32
    same = jnp.concatenate([jnp.zeros((2, group)), jnp.full((2, group), 0.25)], axis=1)
    back = dequantize(*quantize(same, group, mode=mode, axis="col"), mode=mode, group_size=group, axis="col")
    assert bool((back[:, :group] == 0).all())
    assert float(jnp.abs(back[:, group:] - 0.25).max()) <= 0.25 * (0.07 if mode == "nvfp4" else 0.13)


def test_formats_of_microscaling_hold_what_they_can_hold_exactly():
    values = jnp.tile(jnp.array([0.5, -1.5, 6.0, -4.0, 3.0, 2.0, -1.0, 0.0]), (2, 4)) * 0.125
    packed, scales = quantize(values, mode="mxfp4", axis="col")
    assert np.asarray(scales).tolist() == [[124], [124]]  # e8m0: 2 ** (124 - 127)
    np.testing.assert_array_equal(dequantize(packed, scales, mode="mxfp4", axis="col"), values)


@pytest.mark.parametrize(("transpose", "axis"), [(False, "row"), (True, "col")])
def test_the_operation_takes_the_arrays_that_quantize_returns(transpose, axis):
    x = jax.random.normal(jax.random.key(1), (3, 64))
    made = quantize(WEIGHTS, 32, axis=axis)
    want = x @ dequantize(*made, group_size=32, axis=axis).T
    got = quantized_matmul(x, *made, group_size=32, transpose=transpose, axis=axis)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
    flipped = prepack_quantized_weights(WEIGHTS.T, 32, transpose=False) if axis == "row" else None
    if flipped is not None:  # weights that are [K, N] already
        for one, other in zip(flipped, made, strict=True):
            np.testing.assert_array_equal(one, other)


def test_the_gradient_of_x_is_that_of_the_dequantised_product():
    x = jax.random.normal(jax.random.key(1), (3, 64))
    made = quantize(WEIGHTS, 32)
    dense = dequantize(*made, group_size=32)
    got = jax.grad(lambda x: jnp.sum(jnp.sin(quantized_matmul(x, *made, group_size=32))))(x)
    np.testing.assert_allclose(got, jax.grad(lambda x: jnp.sum(jnp.sin(x @ dense.T)))(x), rtol=1e-4, atol=1e-4)


def test_scales_and_zeros_are_constants_with_gradients_of_zero():
    packed, scales, zeros = quantize(WEIGHTS, 32)
    call = lambda scales, zeros: quantized_matmul(jnp.ones((3, 64)), packed, scales, zeros, group_size=32).sum()  # noqa: E731
    for gradient, value in zip(jax.grad(call, (0, 1))(scales, zeros), (scales, zeros), strict=True):
        assert gradient.shape == value.shape
        assert not gradient.any()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"mode": "int4"}, "mode: got 'int4', wants one of affine, nf4"),
        ({"mode": "nf4", "bits": 8}, "bits: got 8, wants 4 for nf4"),
        ({"bits": 9}, "bits: got 9, wants 1 to 8 for affine"),
        ({"group_size": 24}, "group_size: got 24, wants a power of two"),
        ({"group_size": 64}, "scales: got shape (64, 3), wants [64, 1]"),
        ({"axis": "col"}, "axis: got 'col' with transpose=False"),
        ({"zeros": None}, "zeros: got None with mode 'affine', wants zeros"),
        ({"x": jnp.ones((3, 65))}, "x: got shape (3, 65), wants [M, 64]"),
        ({"w": jnp.ones((64, 12))}, "w: got float32[64, 12], wants packed codes uint32"),
        ({"scales": jnp.ones((64, 3), jnp.int8)}, "scales: got dtype int8, wants float16 or bfloat16 or float32"),
    ],
)
def test_wrong_arguments_are_refused_by_name(change, said):
    packed, scales, zeros = quantize(WEIGHTS, 32)
    given = {"x": jnp.ones((3, 64)), "w": packed, "scales": scales, "zeros": zeros, "group_size": 32} | change
    with pytest.raises(ValueError, match=r".*") as caught:
        quantized_matmul(**given)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    "choice",
    [
        {"fuse": False},
        {"strict_fuse": True},
        {"tpu_path": "predecode"},
        {"allow_dense_fallback": False},
        {"gemv_mode": "on"},
        {"revsplit_k": "off", "revsplit_k_parts": 4},
    ],
    ids=str,
)
def test_choices_of_a_kernel_have_no_effect_and_explain_names_them(choice):
    made = quantize(WEIGHTS, 32)
    given = (jnp.ones((3, 64)), *made)
    want = quantized_matmul(*given, group_size=32, platform="xla")
    np.testing.assert_array_equal(quantized_matmul(*given, group_size=32, platform="xla", **choice), want)
    said = str(ejkernel.explain(quantized_matmul, *given, group_size=32, platform="xla", **choice).forward)
    assert f"{', '.join(sorted(choice))}: no effect, xla does not read" in said


@pytest.mark.parametrize(
    ("weights", "said"),
    [(jnp.ones((60, 64)), "wants N in multiples of group_size 64"), (jnp.ones(64), "w: got float32[64], wants")],
)
def test_weights_that_cannot_be_quantised_are_refused(weights, said):
    with pytest.raises(ValueError, match=r".*") as caught:
        quantize(weights)
    assert said in str(caught.value)


def experts(axis, mode="affine"):
    """Packed matrices as `grouped_matmul` takes them, and what they hold, [E, N, K]."""
    made = quantize(jax.random.normal(jax.random.key(2), (3, 64, 96)), 32, mode=mode, axis=axis)
    packed = {"rhs": made[0], "rhs_scale": made[1], "rhs_zeros": made[2] if made[2:] else None}
    options = {"rhs_mode": mode, "rhs_group_size": 32, "transpose_rhs": axis == "col"}
    return {**packed, **options}, dequantize(*made, group_size=32, mode=mode, axis=axis)


@pytest.mark.parametrize("mode", ["affine", "nf4", "mxfp8"])
@pytest.mark.parametrize("axis", ["row", "col"])
def test_grouped_matmul_takes_the_same_weights(axis, mode):
    packed, dense = experts(axis, mode)
    x, sizes = jax.random.normal(jax.random.key(1), (10, 96)), jnp.array([4, 0, 5])

    def call(x):
        return grouped_matmul(x, group_sizes=sizes, **packed)

    def meaning(x):
        return grouped_matmul(x, dense, sizes, transpose_rhs=True)

    np.testing.assert_allclose(call(x), meaning(x), rtol=1e-5, atol=1e-4)
    got, want = (jax.grad(lambda x, f=f: jnp.sum(jnp.sin(f(x))))(x) for f in (call, meaning))
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)


def test_scales_of_packed_experts_have_their_gradient():
    packed, dense = experts("row")
    x, sizes = jax.random.normal(jax.random.key(1), (10, 96)), jnp.array([4, 0, 5])
    got = jax.grad(lambda s: jnp.sum(grouped_matmul(x, group_sizes=sizes, **{**packed, "rhs_scale": s})))(
        packed["rhs_scale"]
    )
    # d out / d w summed over columns is x; a scale's share is that times (q - zero), which is w / scale.
    scale = packed["rhs_scale"].astype(jnp.float32)
    codes = jnp.swapaxes(dense, 1, 2).reshape(*scale.shape, 32) / scale[..., None]
    sums = jnp.stack([x[:4].sum(0), jnp.zeros(96), x[4:9].sum(0)])
    np.testing.assert_allclose(got, (codes.sum(-1) * sums[:, :, None]).astype(jnp.float16), rtol=5e-3, atol=0.05)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"rhs_mode": None}, "rhs_group_size: got a value without rhs_mode"),
        ({"rhs_scale": None}, "rhs_scale: got None with rhs_mode 'affine'"),
        ({"rhs_zeros": None}, "rhs_zeros: got None with mode 'affine'"),
        ({"rhs_group_size": 64}, "rhs_scale: got shape (3, 96, 2), wants [3, 96, 1] for rhs"),
        ({"lhs": jnp.ones((4, 97))}, "rhs: got shape (3, 96, 64)"),
    ],
)
def test_packed_experts_that_do_not_fit_are_refused_by_name(change, said):
    given = {"lhs": jnp.ones((4, 96)), "group_sizes": jnp.array([1, 1, 1]), **experts("row")[0], **change}
    with pytest.raises(ValueError, match=r".*") as caught:
        grouped_matmul(**given)
    assert said in str(caught.value)
