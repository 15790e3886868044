"""Training, prefill and decoding agree: the same queries, keys and values give the same numbers in every operation."""

import jax
import jax.numpy as jnp
import numpy as np
import paged_calls
import paged_loop
import pytest
from paged_calls import DECODING, PACKED, Paged

from ejkernel.modules import flash_attention

LENGTH, HEADS, SIZE = 21, 4, 16
SINKS = np.array([0.5, -1.0, 2.0, 0.0], np.float32)
WHOLE = paged_loop.make((LENGTH,), (LENGTH,), d=SIZE, seed=4)

OPTIONS = {
    "plain": {},
    "window": {"window": 6},
    "sinks": {"sinks": SINKS},
    "soft cap": {"cap": 1.5},
    "everything": {"window": 6, "sinks": SINKS, "cap": 1.5},
}


def trained(window=None, sinks=None, cap=None):
    """Flash attention as in training. Its int window would be another: w keys before the query's own."""
    tokens = (jnp.asarray(x[0], jnp.float32)[None] for x in (WHOLE.queries, WHOLE.keys, WHOLE.values))
    aux = None if sinks is None else jnp.asarray(sinks)
    band = None if window is None else (window - 1, 0)
    given = {"causal": True, "sliding_window": band, "logits_soft_cap": cap}
    return np.asarray(jax.jit(lambda *x: flash_attention(*x, None, None, None, aux, **given))(*tokens)[0])


def prompts():
    """The newest 5 tokens of the sequence, and all of the first 9, as a batch; and which rows of training they are."""
    query, key, value = (x[0] for x in (WHOLE.queries, WHOLE.keys, WHOLE.values))
    batch = paged_loop.Batch(queries=[query[-5:], query[:9]], keys=[key, key[:9]], values=[value, value[:9]])
    return batch, [*range(LENGTH - 5, LENGTH), *range(9)]


def tokens():
    """Tokens 20, 8 and 0 with what is before them, as in decoding."""
    rows, (query, key, value) = [20, 8, 0], (x[0] for x in (WHOLE.queries, WHOLE.keys, WHOLE.values))
    ends = [row + 1 for row in rows]
    queries, keys, values = [query[n - 1 : n] for n in ends], [key[:n] for n in ends], [value[:n] for n in ends]
    return paged_loop.Batch(queries=queries, keys=keys, values=values), rows


@pytest.mark.parametrize("name", OPTIONS)
def test_training_prefill_and_decoding_give_the_same_numbers(name):
    options, want = OPTIONS[name], trained(**OPTIONS[name])
    assert np.abs(want).max() > 0.5
    for ops, (batch, rows) in ((PACKED, prompts()), (DECODING, tokens())):
        for op in ops:
            got = paged_calls.output(op, Paged(batch), **options)
            np.testing.assert_allclose(got, want[rows], rtol=2e-5, atol=2e-6, err_msg=op)


def test_options_of_the_model_change_its_output():
    outputs = [trained(**options) for options in OPTIONS.values()]
    pairs = [(one, other) for n, one in enumerate(outputs) for other in outputs[:n]]
    assert all(np.abs(one - other).max() > 0.01 for one, other in pairs)
