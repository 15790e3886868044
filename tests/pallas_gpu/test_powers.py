"""The polynomial that stands in for half of the powers of two, in the kernel's own steps."""

import numpy as np

from ejkernel_pallas.gpu.tiled_attention.powers import COEFFICIENTS, MANTISSA, ROUNDS
from ejkernel_pallas.gpu.tiled_attention.spec import SETTLED


def test_the_polynomial_is_closer_than_bfloat16_is():
    exponents = np.linspace(-SETTLED, SETTLED, 200_001, dtype=np.float32)
    c0, c1, c2, c3 = np.float32(COEFFICIENTS)
    rounded = exponents + np.float32(ROUNDS)
    rest = exponents - (rounded - np.float32(ROUNDS))
    value = ((c3 * rest + c2) * rest + c1) * rest + c0
    powers = (value.view(np.int32) + (rounded.view(np.int32) << MANTISSA)).view(np.float32)
    np.testing.assert_allclose(powers, np.exp2(np.float64(exponents)), rtol=8e-5)
