"""Paged attention on lengths, tables, windows and tiles that nobody chose, against the loop."""

import jax
import jax.numpy as jnp
import numpy as np
import paged_calls
import paged_loop
from hypothesis import given, settings
from hypothesis import strategies as st
from paged_calls import QUICK, Paged

from ejkernel.families.paged_attention import PagedAttention
from ejkernel_xla.paged_attention.config import PagedTiles
from ejkernel_xla.paged_attention.forward import forward

SEQUENCES, ROWS, SLOTS, ENTRIES, PAGES = 3, 16, 4, 6, 20


@st.composite
def batches(draw):
    """Up to three sequences, of which the newest tokens are queries, of 16 rows in all at most."""
    lens = draw(st.lists(st.integers(0, SLOTS * ENTRIES), min_size=SEQUENCES, max_size=SEQUENCES))
    rows = [draw(st.integers(0, min(5, n))) for n in lens]
    return paged_loop.make(lens, rows, heads=(2, 1), d=3, v=2, seed=draw(st.integers(0, 99)))


# Few combinations of what is compiled, since each is compiled; lengths and tables are data.
SHAPES = [
    (None, True, (1, 1, 1)),
    ((3, 0), True, (4, 5, 2)),
    ((0, 4), False, (16, 24, 3)),
    ((None, 2), False, (3, 7, 8)),
]


COMPILED = {}


def compiled(shape):
    """The family's kernel for a window, causality and tiles."""
    if shape not in COMPILED:
        window, causal, (queries, keys, stack) = shape
        config = PagedTiles(block_q=queries, block_kv=keys, stack=stack)

        def run(query, key, value, lens, tables, starts, live):
            record = PagedAttention(
                query=query,
                key_pages=key,
                value_pages=value,
                block_tables=tables,
                kv_lens=lens,
                query_start=starts,
                softmax_scale=0.7,
                kv_layout="pshd",
                kv_heads=None,
                num_seqs=live,
                causal=causal,
                sliding_window=window,
            )
            return forward(record, config)[0]

        COMPILED[shape] = jax.jit(run, compiler_options=QUICK)
    return COMPILED[shape]


@settings(max_examples=60, deadline=None, derandomize=True)
@given(batch=batches(), shape=st.sampled_from(SHAPES), live=st.integers(1, SEQUENCES))
def test_random_batches_match_the_formula(batch, shape, live):
    paged = Paged(batch, slots=SLOTS, entries=ENTRIES)
    query, key, value, lens, tables, starts = paged_calls.arguments("unified_attention", paged)
    query = jnp.pad(query, ((0, ROWS - len(query)), (0, 0), (0, 0)), constant_values=jnp.nan)
    key, value = (jnp.pad(x, ((0, PAGES - len(x)), *((0, 0),) * 3), constant_values=jnp.nan) for x in (key, value))
    output, lse = compiled(shape)(query, key, value, lens, tables, starts, live)
    window, causal, _ = shape
    results = paged_loop.attend(batch, scale=0.7, causal=causal, window=window)[:live]
    want, denominators = (np.concatenate(x) for x in zip(*results, strict=True))
    np.testing.assert_allclose(output[: len(want)], want, rtol=2e-5, atol=2e-6)
    np.testing.assert_allclose(lse[: len(want)], denominators, rtol=2e-5, atol=2e-6)
    assert not np.any(output[len(want) :])
    assert np.all(np.isneginf(lse[len(want) :]))
