"""What the operations over paged caches compute, in float64, against a loop over rows, heads and keys.

Both the XLA kernels, with tiles that nothing divides, and the operations' references.
"""

import jax
import jax.numpy as jnp
import numpy as np
import paged_calls
import paged_loop
import pytest
from paged_calls import DECODING, OPS, PACKED, Paged

from ejkernel.modules import unified_attention
from ejkernel.ops.plugins import registry

# Numbers of the heads are exact in float32, in which the calls are given them.
SINKS, SLOPES = np.array([[0.5, -1.25, 0.125, 2.0], [0.5, 0.25, -0.5, 0.125]])
EVERYTHING = {"scale": 0.4, "window": 7, "cap": 1.5, "sinks": SINKS}

pytestmark = pytest.mark.usefixtures("x64")


def batch_for(op, **options):
    """Lengths with 0, 1, 63 and 129 among them; one query each for decoding, one sequence for `prefill`."""
    lens, q_lens = (17, 63, 0, 1, 129), (5, 63, 0, 1, 1)
    if op in DECODING:
        lens, q_lens = (63, 1, 0, 129), (1, 1, 1, 1)
    if op == "prefill_page_attention":
        lens, q_lens = (129,), (63,)
    return paged_loop.make(lens, q_lens, **options)


def check(op, paged, *, reference=False, **options):
    want = np.concatenate([output for output, _ in paged_loop.attend(paged.batch, **options)])
    got = paged_calls.output(op, paged, cfg=paged_calls.tiles(op, 6, 10, 3), **options)
    assert got.dtype == np.float64
    assert got.shape == want.shape
    np.testing.assert_allclose(got, want, rtol=1e-11, atol=1e-12)
    if reference:
        positional, keywords = paged_calls.keywords(op, paged, options)
        declared = registry().ops[op]
        record, _ = declared.bind((*paged_calls.arguments(op, paged), *positional), keywords)
        output = jax.tree.leaves(jax.jit(declared.reference, compiler_options=paged_calls.QUICK)(record))[0]
        np.testing.assert_allclose(output, want, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("op", OPS)
def test_calls_without_options_match_the_formula_for_empty_short_and_long_sequences(op):
    check(op, Paged(batch_for(op), dtype=jnp.float64))


@pytest.mark.parametrize("op", OPS)
def test_scale_window_soft_cap_and_sinks_together_match_the_formula(op):
    check(op, Paged(batch_for(op), slots=5, dtype=jnp.float64), reference=True, **EVERYTHING)


@pytest.mark.parametrize("op", ["page_attention", "prefill_page_attention", *PACKED[-3:]])
def test_eight_query_heads_share_one_kv_head_of_60_numbers(op):
    wider = None if op in ("ragged_page_attention_v2", "ragged_page_attention_v3") else 12  # one array for both
    check(op, Paged(batch_for(op, heads=(8, 1), d=60, v=wider), slots=16, dtype=jnp.float64))


@pytest.mark.parametrize("op", ["unified_attention", "chunked_prefill_paged_decode"])
def test_biases_of_uncapped_and_capped_scores(op):
    options = {"alibi": SLOPES}
    if op == "unified_attention":
        options["qq_bias"] = np.random.default_rng(3).normal(size=(9, 9)).astype(np.float32).astype(np.float64)
    check(op, Paged(batch_for(op), dtype=jnp.float64), reference=True, **options, cap=2.0)


def test_without_causality_the_window_looks_both_ways():
    op = "unified_attention"
    check(op, Paged(batch_for(op), dtype=jnp.float64), reference=True, causal=False, window=(6, 3))


@pytest.mark.parametrize("window", [(3, None), (0, 0)])
def test_windows_of_two_sides(window):
    check("unified_attention", Paged(batch_for("unified_attention"), dtype=jnp.float64), window=window)


def test_decode_attention_returns_the_log_of_the_denominator():
    paged = Paged(batch_for("decode_attention"), dtype=jnp.float64)
    _, lse = paged_calls.run("decode_attention", paged, cap=2.0)
    want = np.concatenate([lse for _, lse in paged_loop.attend(paged.batch, cap=2.0)])
    assert np.isneginf(want).any()
    np.testing.assert_allclose(lse, want, rtol=1e-11)


def test_ragged_decode_starts_anywhere():
    paged, first = Paged(batch_for("ragged_decode_attention"), dtype=jnp.float64), np.array([60, 1, 0, 5], np.int32)
    query, key, value, _, ends = paged_calls.arguments("ragged_decode_attention", paged)
    got = paged_calls.ej.ragged_decode_attention(query, key, value, jnp.asarray(first), ends)
    np.testing.assert_allclose(got, paged_loop.packed(paged.batch, first=first), rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize(
    ("op", "dtype"),
    [("unified_attention", jnp.bfloat16), ("ragged_page_attention_v3", jnp.float16), ("page_attention", jnp.float32)],
)
def test_narrow_dtypes_accumulate_in_float32(op, dtype):
    paged = Paged(batch_for(op), dtype=dtype)
    got, want = paged_calls.output(op, paged), paged_loop.packed(paged.batch)
    assert got.dtype == dtype
    np.testing.assert_allclose(got.astype(np.float64), want, rtol=0, atol=20 * float(jnp.finfo(dtype).eps))


def test_functions_of_pairs_read_sequences_and_positions():
    """`unified_attention` with `score_mod` and `mask_mod` in float64, against a loop over pairs; some see no key."""
    random = np.random.default_rng(0)
    queries, table = random.normal(size=(8, 4, 8)), random.normal(size=(4, 9))
    keys, values = random.normal(size=(2, 16, 4, 2, 8))
    lengths, starts, pages = [20, 10], [0, 7, 8], [[3, 5, 0, 7, 9], [1, 2, 11, 0, 0]]
    got = unified_attention(
        *map(jnp.asarray, (queries, keys, values, lengths, pages, starts)),
        score_mod=lambda s, n, h, q, k: s + jnp.asarray(table)[h, jnp.minimum(q - k, 8)] * (n + 1),
        mask_mod=lambda n, h, q, k: k >= 12 * n + h,
        platform="xla",
    )
    wanted = np.zeros(got.shape)
    for n, h in np.ndindex(2, 4):
        for row in range(starts[n], starts[n + 1]):
            position = lengths[n] - starts[n + 1] + row
            attended = [k for k in range(position + 1) if k >= 12 * n + h]
            if not attended:
                continue
            k, v = (np.array([x[pages[n][i // 4], i % 4, h // 2] for i in attended]) for x in (keys, values))
            terms = [table[h, min(position - i, 8)] * (n + 1) for i in attended]
            weights = np.exp(k @ queries[row, h] * 8**-0.5 + terms)
            wanted[row, h] = weights @ v / weights.sum()
    np.testing.assert_allclose(got, wanted, rtol=1e-9, atol=1e-12)
