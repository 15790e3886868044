"""What isolated attention multiplies is finite on tensor cores too, which round float32 numbers to TF32."""

import jax.numpy as jnp
import numpy as np

from ejkernel.families.tiled_attention import isolation


def to_tf32(x: jnp.ndarray) -> np.ndarray:
    """Numbers with the 10 bits of TF32, to the nearest and ties away from zero, as `cvt.rna.tf32.f32` rounds them."""
    bits = np.asarray(x).view(np.uint32)
    return ((bits + np.uint32(1 << 12)) & np.uint32(0xFFFFE000)).view(np.float32)


def test_largest_numbers_of_float32_stay_finite_in_tf32() -> None:
    largest = np.finfo(np.float32).max
    x = jnp.asarray([largest, -largest, np.inf, -np.inf, np.nan, 1.5, 3.4e38], jnp.float32)
    assert np.isinf(to_tf32(x)[:2]).all()
    found = isolation.finite_or_zero(x)
    largest = isolation.MAX_TF32
    np.testing.assert_array_equal(found, jnp.asarray([largest, -largest, 0, 0, 0, 1.5, 3.4e38], jnp.float32))
    assert np.isfinite(to_tf32(found)).all()
    np.testing.assert_allclose(found[:2], x[:2], rtol=2.0**-11)


def test_largest_finite_bfloat16_is_kept() -> None:
    x = jnp.asarray([jnp.finfo(jnp.bfloat16).max, jnp.inf], jnp.bfloat16)
    found = isolation.finite_or_zero(x)
    assert found.dtype == jnp.bfloat16
    np.testing.assert_array_equal(found.astype(jnp.float32), [float(jnp.finfo(jnp.bfloat16).max), 0])


def test_keys_are_marked_nan_for_infinite_values_but_not_the_largest_finite() -> None:
    value = jnp.full((1, 2, 1, 4), np.finfo(np.float32).max).at[0, 1].set(jnp.inf)
    marked = isolation.nonfinite_values_to_keys(jnp.ones_like(value), value)
    np.testing.assert_array_equal(jnp.isnan(marked["key"]).any(axis=-1), [[[False], [True]]])
    assert np.isfinite(to_tf32(marked["value"])).all()
