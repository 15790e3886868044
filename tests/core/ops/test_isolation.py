"""The policy that keeps sequences apart which share tiles of attention."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel import explain
from ejkernel.modules import flash_attention
from ejkernel.ops import isolate_sequences

LENGTHS = jnp.array([0, 5, 8])
X = jax.random.normal(jax.random.key(0), (1, 8, 1, 16))


def spared(value):
    """The output of the second sequence, with its gradient."""

    def loss(value):
        output = flash_attention(X, X, value, cum_seqlens_q=LENGTHS)
        return jnp.sum(output[:, 5:]), output[:, 5:]

    gradient, output = jax.jit(jax.grad(loss, has_aux=True))(value)
    return output, gradient[:, 5:]


@pytest.mark.parametrize("bad", [jnp.nan, jnp.inf])
def test_isolate_sequences_keeps_nan_and_inf_in_their_sequence(bad):
    with isolate_sequences():
        clean, dirty = spared(X), spared(X.at[:, :5].set(bad))
    for one, other in zip(clean, dirty, strict=True):
        np.testing.assert_array_equal(one, other)


def test_explain_notes_calls_whose_sequences_are_not_isolated():
    def notes():
        return explain(flash_attention, X, X, X, cum_seqlens_q=LENGTHS).forward.notes

    assert any("isolate_sequences" in note for note in notes())
    with isolate_sequences():
        assert not any("isolate_sequences" in note for note in notes())
    assert not any("isolate_sequences" in note for note in explain(flash_attention, X, X, X).forward.notes)
