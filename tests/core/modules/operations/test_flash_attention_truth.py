"""What `flash_attention` computes, in float64, for a set of calls that covers all pairs of options.

`reference` against the naive loop; the XLA kernels and all of their gradients against `reference`; the gradients
against finite differences.
"""

import dataclasses

import flash_calls
import jax
import jax.numpy as jnp
import naive
import numpy as np
import pytest
from flash_calls import COMBINATIONS, FACTORS, PLAIN
from pairwise import covered

from ejkernel.modules.operations.flash_attention import reference

EPSILON = 1e-5
ROUNDED = [
    {**PLAIN, "logits": "bfloat16", "cap": 1.5, "mask": "shared", "sinks": "shared"},
    {**PLAIN, "logits": "float16", "normalize": False, "bias": "full", "dropout": 0.3},
    {**PLAIN, "logits": "bfloat16", "normalize": False, "cap": 1.5, "causal": True},  # has rows with tied maxima
]

pytestmark = pytest.mark.usefixtures("x64")


@dataclasses.dataclass(frozen=True)
class Evaluated:
    """A call, its differentiable arrays, and (output, gradients) of both ways to compute it."""

    call: naive.Call
    given: dict
    kernel: object
    got: tuple
    want: tuple


def evaluate(combination):
    call = flash_calls.make(combination)
    given = flash_calls.arrays(call)
    weights = np.random.default_rng(1).normal(size=(*call.query.shape[:3], call.value.shape[3]))

    def graded(compute):
        def loss(given):
            output = compute(call, given)
            return jnp.sum(output * weights), output

        return jax.jit(jax.value_and_grad(loss, has_aux=True), compiler_options=flash_calls.QUICK)

    kernel = graded(flash_calls.run)
    (_, got), got_gradients = kernel(given)
    (_, want), want_gradients = graded(lambda call, given: reference(flash_calls.record(call, given)))(given)
    return Evaluated(call, given, kernel, (got, got_gradients), (want, want_gradients))


@pytest.fixture(scope="module", params=COMBINATIONS, ids=flash_calls.name)
def evaluated(request, x64):
    return evaluate(request.param)


@pytest.fixture(scope="module", params=ROUNDED, ids=flash_calls.name)
def rounded(request, x64):
    return evaluate(request.param)


def check_reference(evaluated):
    np.testing.assert_allclose(evaluated.want[0], naive.attention(evaluated.call), rtol=1e-11, atol=1e-12)


def check_kernels(evaluated):
    (got, gradients), (want, wanted) = evaluated.got, evaluated.want
    assert got.dtype == jnp.float64
    np.testing.assert_allclose(got, want, rtol=1e-11, atol=1e-12)
    assert gradients.keys() == wanted.keys() == evaluated.given.keys()
    for field, gradient in gradients.items():
        np.testing.assert_allclose(gradient, wanted[field], rtol=1e-9, atol=1e-11, err_msg=field)


def test_reference_is_the_formula(evaluated):
    check_reference(evaluated)


def test_kernels_and_all_gradients_are_those_of_the_reference(evaluated):
    check_kernels(evaluated)


def test_gradients_are_finite_differences(evaluated):
    rng = np.random.default_rng(2)
    for field, array in evaluated.given.items():
        direction = rng.normal(size=array.shape)
        ends = [{**evaluated.given, field: array + step * direction} for step in (EPSILON, -EPSILON)]
        high, low = (float(evaluated.kernel(end)[0][0]) for end in ends)
        slope = float(jnp.vdot(evaluated.got[1][field], direction))
        assert slope == pytest.approx((high - low) / (2 * EPSILON), rel=1e-6, abs=1e-7), field


def test_rows_without_keys_are_exactly_zero(evaluated):
    attended = naive.attended_rows(evaluated.call)
    output, gradients = evaluated.got
    assert np.all(np.asarray(output)[~attended] == 0)
    assert np.all(np.asarray(gradients["query"])[~attended] == 0)
    assert all(bool(jnp.isfinite(gradient).all()) for gradient in gradients.values())


def test_rounded_scores_are_the_formula(rounded):
    check_reference(rounded)


def test_kernels_look_through_the_rounding_of_scores_as_the_reference_does(rounded):
    check_kernels(rounded)


def test_the_combinations_cover_all_pairs_of_options():
    seen = {pair for combination in COMBINATIONS for pair in covered(combination)}
    for one, values in FACTORS.items():
        for other, others in FACTORS.items():
            for a in values:
                for b in others if one < other else ():
                    pair = {one: a, other: b}
                    assert not flash_calls.allowed(pair) or frozenset(pair.items()) in seen, pair


def test_some_rows_of_the_combinations_have_no_keys():
    calls = [flash_calls.make(combination) for combination in COMBINATIONS]
    assert sum(not naive.attended_rows(call).all() for call in calls) >= len(calls) // 2
