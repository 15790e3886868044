"""Every recipe against the original layer in float32: values, gradients, packed sequences, decoding with a cache."""

import importlib
from pathlib import Path
from types import ModuleType

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.models.fixtures import LENGTHS, Fixture, load

FAMILIES = sorted(x.stem for x in (Path(__file__).parent / "fixtures").glob("*.npz"))


def recipe(family: str) -> ModuleType:
    """The recipe of a family."""
    return importlib.import_module(f"tests.models.recipes.{family}")


def having(function: str) -> list[str]:
    """The families whose recipe has this function."""
    return [family for family in FAMILIES if hasattr(recipe(family), function)]


def assert_close(got: jax.Array, want: np.ndarray, what: str, tolerance: float = 2e-5) -> None:
    """Compares by the largest entry: float32 sums in another order differ by about its rounding.

    Entries count as at least 0.1: the gradient of a bias of keys is zero but for rounding.
    """
    assert got.shape == want.shape, what
    error = float(np.max(np.abs(np.asarray(got, np.float64) - want))) / max(float(np.max(np.abs(want))), 0.1)
    assert error <= tolerance, f"{what}: off by {error:.2g} of the largest entry"


@pytest.mark.parametrize("family", having("prefill"))
def test_value_and_gradients_are_the_originals(family: str) -> None:
    fixture = load(family)
    output, pullback = jax.vjp(jax.jit(recipe(family).prefill), fixture.weights, fixture.x)
    assert_close(output, fixture.y, "y")
    weights, x = pullback(fixture.dy)
    assert_close(x, fixture.dx, "gradient of x", 5e-5)
    assert weights.keys() == fixture.weight_gradients.keys()
    for name, gradient in fixture.weight_gradients.items():
        assert_close(weights[name], gradient, f"gradient of {name}", 5e-5)


@pytest.mark.parametrize("family", having("packed"))
def test_packed_sequences_are_the_originals_of_each(family: str) -> None:
    fixture = load(family)
    starts = jnp.array(np.cumsum([0, *LENGTHS]), jnp.int32)
    output = jax.jit(recipe(family).packed)(fixture.weights, fixture.x[:1], starts)
    assert_close(output, fixture.y_packed, "y")


@pytest.mark.parametrize("family", having("decode"))
def test_decoding_with_a_cache_gives_the_originals_tokens(family: str) -> None:
    fixture: Fixture = load(family)
    model = recipe(family)
    batch, tokens, _ = fixture.x.shape

    def step(cache: jax.Array, token: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        x, position = token
        y, cache = model.decode(fixture.weights, x[:, None], cache, position)
        return cache, y[:, 0]

    inputs = fixture.x.swapaxes(0, 1), jnp.arange(tokens, dtype=jnp.int32)
    _, output = jax.jit(lambda: jax.lax.scan(step, model.empty_cache(batch, tokens), inputs))()
    assert_close(output.swapaxes(0, 1), fixture.y, "y")


def test_every_recipe_has_a_fixture_and_every_fixture_a_recipe() -> None:
    recipes = {x.stem for x in (Path(__file__).parent / "recipes").glob("[!_]*.py")} - {"common"}
    originals = {x.stem for x in (Path(__file__).parent / "originals").glob("[!_]*.py")} - {"common"}
    assert recipes == set(FAMILIES) == originals
