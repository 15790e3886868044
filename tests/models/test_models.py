"""Every recipe against the original layer in float32: values, gradients, packed sequences, decoding with a cache."""

import pytest
from tests.models.checking import CHECKS, error, having

VALUE, GRADIENT = 2e-5, 5e-5
"""Float32 sums in another order differ by about this much of the largest entry."""


@pytest.mark.whole
@pytest.mark.parametrize(("function", "family"), [(name, family) for name in CHECKS for family in having(name)])
def test_recipe_computes_what_the_original_layer_does(function: str, family: str) -> None:
    for name, (got, want) in CHECKS[function](family).items():
        assert error(got, want) <= (GRADIENT if name.startswith("gradient") else VALUE), name
