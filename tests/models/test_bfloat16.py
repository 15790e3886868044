"""An eighth of the recipes in bfloat16, with what dispatch chooses on this device, against the original in float32."""

import jax.numpy as jnp
import pytest
from tests.models.checking import CHECKS, error, having

EIGHTH = [(name, family) for name in ("prefill", "packed", "decode") for family in having(name)][6::8]
VALUE, GRADIENT = 0.02, 0.05
"""Layers round to bfloat16 several times; the fixtures' weights and inputs are exact in it."""


@pytest.mark.parametrize(("function", "family"), EIGHTH)
def test_recipe_in_bfloat16_computes_what_the_original_layer_does(function: str, family: str) -> None:
    for name, (got, want) in CHECKS[function](family, jnp.bfloat16).items():
        assert error(got, want) <= (GRADIENT if name.startswith("gradient") else VALUE), name
