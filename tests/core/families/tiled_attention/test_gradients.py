"""The gradient of sinks that kernels share, against that of the formula."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.families.tiled_attention import TiledAttention
from ejkernel.families.tiled_attention.gradients import sinks_gradient, unnormalised_gradients
from ejkernel.types.pullback import Pullback

SCORES, VALUES, SINKS, WEIGHTS = (
    np.random.default_rng(0).normal(size=shape).astype(np.float32)
    for shape in ((2, 3, 5, 7), (2, 3, 7, 4), (3,), (2, 3, 5))
)
SCORES[0, 0, 1] = -np.inf  # a row with nothing to attend


def formula(sinks):
    """The output and lse, of which the sinks are the only unknown; a row without keys is zero."""
    lse = jax.nn.logsumexp(SCORES, axis=-1)
    total = jnp.logaddexp(lse, sinks[:, None])
    seen = lse > -jnp.inf
    output = jnp.exp(SCORES - jnp.where(seen, total, 0)[..., None]) @ VALUES
    return output, jnp.where(seen, total, -jnp.inf)


@pytest.mark.parametrize("with_lse", [False, True])
def test_sinks_gradient_equals_that_of_the_formula(with_lse):
    (output, lse), pull = jax.vjp(formula, SINKS)
    cotangent = np.random.default_rng(1).normal(size=output.shape).astype(np.float32)
    dlse = jnp.where(lse > -jnp.inf, WEIGHTS, 0) if with_lse else jnp.zeros_like(lse)
    (expected,) = pull((cotangent, dlse))
    pullback = SimpleNamespace(
        record=SimpleNamespace(softmax_aux=jnp.asarray(SINKS), normalize_output=True),
        residuals=SimpleNamespace(lse=lse),
        lse_cotangent=jnp.asarray(WEIGHTS) if with_lse else None,
    )
    gradient = sinks_gradient(pullback, jnp.sum(output * cotangent, axis=-1))
    np.testing.assert_allclose(gradient, expected, rtol=1e-5, atol=1e-6)
    assert float(jnp.abs(expected).min()) > 0.01


class Unordered(frozenset):
    """A set whose order is never that of names, as another process may have it."""

    def __iter__(self):
        return reversed(sorted(super().__iter__()))


def test_order_of_gradients_does_not_depend_on_set_order():
    """Python orders sets of strings anew in every process: a program would miss the cache of compiled programs."""
    x = jnp.ones((1, 2, 1, 4))
    record = TiledAttention(query=x, key=x, value=x, softmax_scale=1.0, normalize_output=False)
    names = Unordered({"query", "key", "value"})
    pullback = Pullback(record=record, residuals=None, output=x, cotangent=x, grad_fields=names)
    gradients = unnormalised_gradients(lambda part, config: {name: x for name in names}, pullback, None)
    assert list(gradients) == ["key", "query", "value"]
