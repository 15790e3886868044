"""Random calls of all operations against independent float64 loops; more of them by `nox -s random`.

EJKERNEL_RANDOM_SETTINGS and EJKERNEL_RANDOM_SEED say how many programs of each kind, and which. A failure names the
kind, the seed and the number from which the call can be made again:

    EJKERNEL_RANDOM_SEED=7 EJKERNEL_RANDOM_ONLY=123 pytest tests/core/modules/operations/test_random_calls.py -k dense
"""

import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from random_calls import KINDS, Setting, settings

SEED = int(os.environ.get("EJKERNEL_RANDOM_SEED", "0"))
SETTINGS = int(os.environ.get("EJKERNEL_RANDOM_SETTINGS", "0"))
ONLY = os.environ.get("EJKERNEL_RANDOM_ONLY")
DRAWS = 6
SHORT = {"dense": 7, "paged": 6, "delta": 2, "mamba": 2, "gated": 2}
"""Programs of a kind in CI, where it is not 3; all of them together take half a minute."""
QUICK = {"xla_backend_optimization_level": "0"}
STEP = 1e-5

pytestmark = pytest.mark.usefixtures("x64")


@pytest.mark.random
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("kind", KINDS)
def test_random_calls_match_a_loop(kind):
    compared = 0
    for number, setting in settings(kind, SEED, SETTINGS or SHORT.get(kind, 3)):
        if ONLY is not None and number != int(ONLY):
            continue
        try:
            compared += check(setting, np.random.default_rng([SEED, number]))
        except Exception as error:
            raise AssertionError(f"{kind}, seed {SEED}, number {number}: {setting.about}\n{error}") from error
    assert compared


def check(setting: Setting, rng: np.random.Generator) -> int:
    """Compares the draws of a setting, and the gradients of the first; returns how many there were."""
    run = jax.jit(setting.run, compiler_options=QUICK)
    for n in range(DRAWS):
        draw = setting.draws(rng)
        arrays = {name: jnp.asarray(x) for name, x in draw.arrays.items()}
        for got, want in zip(run(arrays), draw.expected, strict=True):
            assert got.shape == want.shape
            np.testing.assert_allclose(got, want, rtol=1e-9, atol=1e-9, err_msg=f"draw {n}")
        if n == 0 and setting.differentiable:
            compare_gradients(setting, draw.arrays, rng)
    return DRAWS


def compare_gradients(setting: Setting, arrays: dict[str, np.ndarray], rng: np.random.Generator) -> None:
    """The gradient along a random direction against a central difference of the loop."""
    weights = [rng.normal(size=x.shape) for x in setting.loop(arrays)]
    direction = {name: rng.normal(size=arrays[name].shape) for name in setting.differentiable}

    def total(results):
        return sum((w * np.where(np.isfinite(x), x, 0)).sum() for w, x in zip(weights, results, strict=True))

    def loss(moved):
        results = setting.run({**{name: jnp.asarray(x) for name, x in arrays.items()}, **moved})
        return sum(jnp.sum(w * jnp.where(jnp.isfinite(x), x, 0)) for w, x in zip(weights, results, strict=True))

    moved = {name: jnp.asarray(arrays[name]) for name in setting.differentiable}
    gradient = jax.jit(jax.grad(loss), compiler_options=QUICK)(moved)
    slope = sum(float(np.vdot(gradient[name], along)) for name, along in direction.items())
    high, low = (
        total(setting.loop({**arrays, **{name: arrays[name] + step * along for name, along in direction.items()}}))
        for step in (STEP, -STEP)
    )
    np.testing.assert_allclose(slope, (high - low) / (2 * STEP), rtol=1e-4, atol=1e-4, err_msg="gradient")
