"""The polynomial that stands in for half of the powers of two, in the kernel's own steps."""

import numpy as np
import pytest

from ejkernel_pallas.gpu.hopper.powers_of_two import EXP2_COEFFICIENTS, MANTISSA_BITS, MIN_EXPONENT, ROUNDING_CONSTANT
from ejkernel_pallas.gpu.tiled_attention.spec import FIXED_MAX_EXPONENT_LIMIT


def exp2_polynomial(exponents: np.ndarray) -> np.ndarray:
    c0, c1, c2, c3 = np.float32(EXP2_COEFFICIENTS)
    rounded = exponents + np.float32(ROUNDING_CONSTANT)
    rest = exponents - (rounded - np.float32(ROUNDING_CONSTANT))
    value = ((c3 * rest + c2) * rest + c1) * rest + c0
    return (value.view(np.int32) + (rounded.view(np.int32) << MANTISSA_BITS)).view(np.float32)


@pytest.mark.parametrize(("low", "high"), [(-FIXED_MAX_EXPONENT_LIMIT, FIXED_MAX_EXPONENT_LIMIT), (MIN_EXPONENT, 0.0)])
def test_the_polynomial_of_exp2_is_more_accurate_than_bfloat16(low, high):
    exponents = np.linspace(low, high, 200_001, dtype=np.float32)
    np.testing.assert_allclose(exp2_polynomial(exponents), np.exp2(np.float64(exponents)), rtol=8e-5)


def test_exponents_below_the_smallest_give_negligible_weights():
    """Rows beyond the end, and weights too small for float32, have exponents that the kernel raises to the smallest."""
    exponents = np.maximum(np.float32([-np.inf, -1e30, -200.0]), np.float32(MIN_EXPONENT))
    made = exp2_polynomial(exponents)
    assert (made >= 0).all()
    assert (made < 3e-38).all()
