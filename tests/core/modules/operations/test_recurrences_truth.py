"""What the recurrences compute, in float64: against loops, references and finite differences."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import transformed
from recurrence_calls import Call, calls, results

EPSILON = 1e-6

pytestmark = pytest.mark.usefixtures("x64")


@dataclasses.dataclass(frozen=True)
class Evaluated:
    """A call with (results, gradients) of the kernel and of the reference."""

    call: Call
    given: dict
    kernel: object
    got: tuple
    want: tuple


@pytest.fixture(scope="module", params=calls(), ids=lambda call: f"{call.op}, {call.name}")
def evaluated(request, x64):
    call = request.param
    given = {name: jnp.asarray(x) for name, x in call.arrays.items()}
    weights = [np.random.default_rng(1).normal(size=x.shape) for x in call.expected()]

    def graded(compute):
        def loss(given):
            output = results(compute(given))
            return sum(jnp.sum(x * w) for x, w in zip(output, weights, strict=True)), output

        return transformed.quickly(jax.value_and_grad(loss, has_aux=True))

    kernel = graded(call.run)
    got, want = (run(given) for run in (kernel, graded(lambda given: call.declared.reference(call.record(given)))))
    return Evaluated(call, given, kernel, (got[0][1], got[1]), (want[0][1], want[1]))


def test_reference_is_the_formula(evaluated):
    for got, want in zip(evaluated.want[0], evaluated.call.expected(), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-10, atol=1e-11)


def test_kernels_are_the_formula(evaluated):
    for got, want in zip(evaluated.got[0], evaluated.call.expected(), strict=True):
        assert got.dtype == jnp.float64
        np.testing.assert_allclose(got, want, rtol=1e-10, atol=1e-11)


def test_all_gradients_are_those_of_the_reference(evaluated):
    gradients, wanted = evaluated.got[1], evaluated.want[1]
    assert gradients.keys() == wanted.keys() == evaluated.given.keys()
    for name, gradient in gradients.items():
        np.testing.assert_allclose(gradient, wanted[name], rtol=1e-8, atol=1e-9, err_msg=name)


def test_gradients_are_finite_differences(evaluated):
    rng = np.random.default_rng(2)
    for name, array in evaluated.given.items():
        direction = rng.normal(size=array.shape)
        ends = [{**evaluated.given, name: array + step * direction} for step in (EPSILON, -EPSILON)]
        high, low = (float(evaluated.kernel(end)[0][0]) for end in ends)
        slope = float(jnp.vdot(evaluated.got[1][name], direction))
        assert slope == pytest.approx((high - low) / (2 * EPSILON), rel=1e-5, abs=1e-5), name
