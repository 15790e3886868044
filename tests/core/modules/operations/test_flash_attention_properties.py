"""`flash_attention` against the naive loop on shapes, masks, windows and segments that nobody chose."""

import flash_calls
import jax.numpy as jnp
import naive
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st


@st.composite
def calls(draw):
    """Small calls with lengths that no tile divides; a few sizes only, since every one is compiled."""
    t, s = draw(st.sampled_from([(1, 1), (1, 9), (9, 1), (9, 9), (5, 9)]))
    heads, kv_heads = draw(st.sampled_from([(2, 1), (2, 2)]))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    ids = st.integers(-1, 2)
    return naive.Call(
        query=3 * rng.normal(size=(2, t, heads, 3)),
        key=rng.normal(size=(2, s, kv_heads, 3)),
        value=rng.normal(size=(2, s, kv_heads, 2)),
        mask=rng.random((2, 1, t, s)) < draw(st.floats(0, 1)),
        q_segment_ids=np.array(draw(st.lists(ids, min_size=2 * t, max_size=2 * t)), np.int32).reshape(2, t),
        kv_segment_ids=np.array(draw(st.lists(ids, min_size=2 * s, max_size=2 * s)), np.int32).reshape(2, s),
        causal=draw(st.booleans()),
        sliding_window=draw(st.sampled_from([None, 1, (3, 0), (0, 0), (None, 2), (4, None)])),
        softmax_aux=rng.normal(size=2),
    )


@settings(max_examples=12, deadline=None, derandomize=True)
@given(call=calls(), size=st.sampled_from([4, 16]))
def test_any_call_is_the_formula(call, size):
    given = flash_calls.arrays(call, jnp.float32)
    got = flash_calls.run(call, given, cfg=flash_calls.tiles(size, size))
    np.testing.assert_allclose(got, naive.attention(call), rtol=2e-5, atol=2e-6)
