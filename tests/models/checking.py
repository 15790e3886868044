"""Runs the recipes and measures how far they are from the original layers."""

import ast
import importlib
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from tests.models.fixtures import LENGTHS, load, load_generated

FOLDER = Path(__file__).parent
FAMILIES = sorted(x.stem for x in (FOLDER / "fixtures").glob("*.npz"))
SHARED = "tests.models.recipes.shared"

Pair = tuple[Any, np.ndarray]
"""What a recipe computes, and what the original layer does."""


def recipe(family: str) -> ModuleType:
    """The recipe of a family."""
    return importlib.import_module(f"tests.models.recipes.{family}")


def shared_layers(family: str) -> list[Path]:
    """The modules of `recipes/shared` that the recipe of a family imports."""
    imports = _imports(FOLDER / "recipes" / f"{family}.py")
    names = [name for module, names in imports if module == SHARED for name in names]
    names += [module.removeprefix(f"{SHARED}.") for module, _ in imports if module.startswith(f"{SHARED}.")]
    return [FOLDER / "recipes" / "shared" / f"{name}.py" for name in names]


def called_operations(family: str) -> list[str]:
    """The names that a recipe, or a shared layer that it imports, has from `ejkernel.modules`."""
    paths = [FOLDER / "recipes" / f"{family}.py", *shared_layers(family)]
    return [
        name for path in paths for module, names in _imports(path) if module == "ejkernel.modules" for name in names
    ]


def _imports(path: Path) -> list[tuple[str, list[str]]]:
    nodes = [x for x in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(x, ast.ImportFrom)]
    return [(node.module or "", [alias.name for alias in node.names]) for node in nodes]


def having(function: str) -> list[str]:
    """The families whose recipe has this function."""
    return [family for family in FAMILIES if hasattr(recipe(family), function)]


def values_and_gradients(family: str, dtype: Any = jnp.float32) -> dict[str, Pair]:
    """The output of whole sequences, and the gradients of the input and of every weight."""
    fixture = load(family, dtype)
    prefill = jax.jit(lambda weights, x: recipe(family).prefill(weights | fixture.buffers, x))
    output, pullback = jax.vjp(prefill, fixture.weights, fixture.x)
    weights, x = pullback(fixture.dy.astype(output.dtype))
    if unknown := fixture.weight_gradients.keys() - weights.keys():
        raise ValueError(f"{family}: no gradients of {unknown}")
    # A weight without a gradient in the original, such as that of a selection, must have a gradient of 0.
    wants = {name: fixture.weight_gradients.get(name, np.zeros(x.shape)) for name, x in weights.items()}
    named = {f"gradient of {name}": (weights[name], want) for name, want in wants.items()}
    return {"y": (output, fixture.y), "gradient of x": (x, fixture.dx), **named}


def packed(family: str, dtype: Any = jnp.float32) -> dict[str, Pair]:
    """The outputs of sequences in one row, where the original gets each on its own."""
    fixture = load(family, dtype)
    starts = jnp.array(np.cumsum([0, *LENGTHS]), jnp.int32)
    output = jax.jit(recipe(family).packed)(fixture.weights, fixture.x[:1], starts)
    if fixture.y_packed is None:
        raise ValueError(f"{family}: the fixture has no packed sequences")
    return {"y": (output, fixture.y_packed)}


def decoded(family: str, dtype: Any = jnp.float32) -> dict[str, Pair]:
    """The outputs of tokens that come one at a time, with a cache."""
    fixture, model = load(family, dtype), recipe(family)
    batch, tokens, _ = fixture.x.shape

    def step(cache: Any, token: tuple[jax.Array, jax.Array]) -> tuple[Any, jax.Array]:
        x, position = token
        y, cache = model.decode(fixture.weights, x[:, None], cache, position)
        return cache, y[:, 0]

    inputs = fixture.x.swapaxes(0, 1), jnp.arange(tokens, dtype=jnp.int32)
    cache = model.empty_cache(batch, tokens)
    kept, _ = jax.eval_shape(step, cache, jax.tree.map(lambda x: x[0], inputs))  # in the dtypes that steps return
    cache = jax.tree.map(lambda x, like: x.astype(like.dtype), cache, kept)
    _, output = jax.jit(lambda: jax.lax.scan(step, cache, inputs))()
    return {"y": (output.swapaxes(0, 1), fixture.y)}


def generated(family: str) -> dict[str, Pair]:
    """The tokens of requests that share steps, where the original has one request at a time."""
    weights, prompts, tokens = load_generated(family)
    return {"tokens": (np.array(recipe(family).generate(weights, prompts, tokens.shape[1])), tokens)}


CHECKS = {"prefill": values_and_gradients, "packed": packed, "decode": decoded, "generate": generated}
"""The function of a recipe -> what compares it with the original layer."""


def error(got: Any, want: np.ndarray) -> float:
    """The largest difference, in parts of the largest entry.

    Entries count as at least 0.1: the gradient of a bias of keys is zero but for rounding.
    """
    if got.shape != want.shape:
        raise ValueError(f"got shape {got.shape}, the original has {want.shape}")
    return float(np.max(np.abs(np.asarray(got, np.float64) - want))) / max(float(np.max(np.abs(want))), 0.1)
