"""Arguments that choose between kernels elsewhere, and pages behind `flash_attention`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ejkernel
from ejkernel.modules import (
    GatedDeltaRuleConfig,
    flash_attention,
    gated_delta_rule,
    grouped_matmul,
    unified_attention,
)

PAGES, SLOTS, G, D = 9, 4, 2, 8
KEYS, VALUES = jax.random.normal(jax.random.key(0), (2, PAGES, SLOTS, G, D))
QUERY = jax.random.normal(jax.random.key(1), (2, 3, 4, D))
TABLES = jnp.array([[3, 5, 0], [1, 2, 8]])
LENGTHS = (7, 12)
CUMULATIVE = jnp.array([0, 7, 19])


def alone(row, queries, **options):
    """The last queries of one sequence, without pages."""
    count = LENGTHS[row]
    key, value = (x[TABLES[row]].reshape(-1, G, D)[None, :count] for x in (KEYS, VALUES))
    whole = jnp.zeros((1, count, 4, D)).at[:, count - len(queries) :].set(queries)
    return flash_attention(whole, key, value, causal=True, **options)[0, count - len(queries) :]


@pytest.mark.parametrize(
    "options",
    [{}, {"sliding_window": 4}, {"logits_soft_cap": 2.0, "softmax_scale": 0.3, "softmax_aux": jnp.arange(4.0)}],
    ids=["plain", "window", "cap, scale and sinks"],
)
def test_keys_in_pages_give_the_output_of_the_same_keys_in_rows(options):
    given = {"cum_seqlens_k": CUMULATIVE, "block_tables": TABLES, "causal": True, **options}
    got = flash_attention(QUERY, KEYS, VALUES, **given)
    packed = jnp.concatenate([QUERY[0, 1:], QUERY[1]])[None]
    ragged = flash_attention(packed, KEYS, VALUES, cum_seqlens_q=jnp.array([0, 2, 5]), **given)
    for row in range(2):
        want = alone(row, QUERY[row], **options)
        np.testing.assert_allclose(got[row], want, rtol=1e-5, atol=1e-5)
        part = ragged[0, :2] if row == 0 else ragged[0, 2:]
        np.testing.assert_allclose(part, want[1:] if row == 0 else want, rtol=1e-5, atol=1e-5)


def test_a_decoding_step_needs_no_causal_and_its_table_is_the_eighth_argument():
    step = (QUERY[:, :1], KEYS, VALUES, None, None, CUMULATIVE, None, TABLES)
    want = [alone(row, QUERY[row, :1])[0] for row in range(2)]
    np.testing.assert_allclose(jax.jit(flash_attention)(*step)[:, 0], want, rtol=1e-5, atol=1e-5)
    table = str(ejkernel.explain(flash_attention, *step))
    assert "unified_attention" in table


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bias": jnp.zeros((1, 1, 3, 12))}, "bias: got a value with block_tables"),
        ({"dropout_prob": 0.1, "dropout_seed": 1}, "dropout_seed: got a value with block_tables"),
        ({"causal": False}, "causal: got False with block_tables and 3 queries per row"),
    ],
)
def test_what_has_no_meaning_with_pages_is_refused_by_name(options, message):
    with pytest.raises(NotImplementedError, match=message):
        flash_attention(QUERY, KEYS, VALUES, **{"causal": True, "block_tables": TABLES, **options})


def test_wrong_block_tables_are_refused_by_name():
    with pytest.raises(ValueError, match=r"block_tables: got shape \(3,\)"):
        flash_attention(QUERY, KEYS, VALUES, block_tables=TABLES[0], causal=True)
    with pytest.raises(ValueError, match="cum_seqlens_q: got a value with block_tables and 2 rows"):
        flash_attention(QUERY, KEYS, VALUES, block_tables=TABLES, cum_seqlens_q=CUMULATIVE // 4, causal=True)


def test_versions_1_to_3_of_grouped_matmul_are_the_same():
    lhs, rhs, sizes = jnp.ones((8, 16)), jnp.ones((2, 16, 4)), jnp.array([3, 5])
    want = grouped_matmul(lhs, rhs, sizes)
    for options in ({"use_v2": True}, {"use_v3": True}, {"do_padding": False}, {"interpret": False}):
        np.testing.assert_array_equal(grouped_matmul(lhs, rhs, sizes, **options), want)
    with pytest.raises(NotImplementedError, match="interpret: got True"):
        grouped_matmul(lhs, rhs, sizes, interpret=True)
    with pytest.raises(
        NotImplementedError, match="out_shard_callback: got a value, wants None; apply it to the result"
    ):
        grouped_matmul(lhs, rhs, sizes, out_shard_callback=lambda x: x)
    with pytest.raises(ValueError, match="use_v2: got str 'yes'"):
        grouped_matmul(lhs, rhs, sizes, use_v2="yes")


def test_num_par_softmax_segments_sets_the_field_of_the_configuration():
    arrays = (QUERY.reshape(6, 4, D), KEYS, VALUES, jnp.array(LENGTHS), TABLES, jnp.array([0, 3, 6]))
    said = str(ejkernel.explain(unified_attention, *arrays, num_par_softmax_segments=4).forward)
    assert "num_par_softmax_segments=4" in said


def test_one_chunk_candidate_sets_the_configuration_and_several_are_refused():
    query, key, value = jax.random.normal(jax.random.key(0), (3, 1, 8, 2, 4))
    beta = jnp.full((1, 8, 2), 0.5)

    def chosen(**options):
        return ejkernel.explain(gated_delta_rule, query, key, value, beta, **options).forward.config.chunk_size

    assert chosen(autotune_chunk_candidates=(16,)) == chosen(cfg=GatedDeltaRuleConfig(chunk_size=16)) == 16
    with pytest.raises(NotImplementedError, match=r"autotune_chunk_candidates: got \[16, 32\]; `ejkernel tune`"):
        chosen(autotune_chunk_candidates=[16, 32])
