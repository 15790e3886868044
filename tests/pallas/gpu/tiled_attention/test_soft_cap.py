"""The polynomial that stands in for tanh near zero, in the kernel's own steps."""

import numpy as np
import pytest

from ejkernel_pallas.gpu.tiled_attention.kernels.soft_cap import MAX_POLYNOMIAL_ARGUMENT, TANH_COEFFICIENTS

INSTRUCTION = 2.0**-11
"""Largest relative error of the chip's approximate tanh, as its manual has it."""


@pytest.mark.parametrize("cap", [5.0, 30.0, 55.0])
def test_the_polynomial_of_tanh_is_more_accurate_than_the_instruction(cap: float):
    inner, exponent = 0.125 / cap, cap * np.log2(np.e)
    first, third = (np.float32(c * inner**n * exponent) for c, n in zip(TANH_COEFFICIENTS, (1, 3), strict=True))
    products = np.linspace(-MAX_POLYNOMIAL_ARGUMENT / inner, MAX_POLYNOMIAL_ARGUMENT / inner, 200_000, dtype=np.float32)
    made = products * (third * (products * products) + first)
    np.testing.assert_allclose(made, exponent * np.tanh(np.float64(products) * inner), rtol=INSTRUCTION)
