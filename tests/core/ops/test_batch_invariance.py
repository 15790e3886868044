"""The policy under which the bits of a row do not depend on what else is in the call."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel import explain
from ejkernel.errors import NoImplementationError, TunerError
from ejkernel.modules import (
    FlashAttentionConfig,
    RaggedPageAttentionv2Config,
    attention,
    flash_attention,
    lightning_attention,
    ragged_page_attention_v2,
)
from ejkernel.ops import (
    ConfigSelectorChain,
    FwdParams,
    batch_invariant,
    forward_mode,
    overlay_cache,
    policy_override,
    registry,
)
from ejkernel.ops.call import make_plan

X = jax.random.normal(jax.random.key(0), (3, 9, 2, 16))


def test_a_row_has_the_same_bits_alone_and_padded_and_jit_tells_the_block_apart():
    call = jax.jit(lambda x: flash_attention(x, x, x, causal=True))
    outside = call(X)
    with batch_invariant():
        together, alone = call(X), call(X[1:2])
        longer = call(jnp.pad(X, ((0, 0), (0, 60), (0, 0), (0, 0))))[:, :9]
    np.testing.assert_array_equal(together[1:2], alone)
    np.testing.assert_array_equal(together, longer)
    np.testing.assert_allclose(outside, together, rtol=1e-5, atol=1e-6)
    assert call._cache_size() == 4


def test_implementations_without_the_claim_are_refused_by_name_for_the_forward_pass_alone():
    with batch_invariant():
        decision = explain(attention, X, X, X)
        with pytest.raises(NoImplementationError, match="batch_invariant: its rows may depend on batch"):
            attention(X, X, X)
    reasons = {v.implementation.name: v.reasons for v in decision.forward.verdicts}
    assert reasons["xla"] == ("batch_invariant: its rows may depend on batch, chunking, padding",)
    assert not any("batch_invariant" in reason for v in decision.backward.verdicts for reason in v.reasons)


def test_a_recurrence_in_two_calls_has_the_bits_of_one():
    call = functools.partial(lightning_attention, layer_idx=0, num_layers=2, return_state=True)
    with batch_invariant():
        whole, _ = call(X, X, X)
        first, state = call(*3 * (X[:, :8],))
        last, _ = call(*3 * (X[1:, 8:],), initial_state=state[1:])
    np.testing.assert_array_equal(whole[:, :8], first)
    np.testing.assert_array_equal(whole[1:, 8:], last)


def test_what_a_claim_leaves_out_refuses_by_name():
    def reasons(**arguments):
        verdicts = explain(flash_attention, X, X, X, **arguments).forward.verdicts
        return next(v.reasons for v in verdicts if v.implementation.name == "xla")

    with batch_invariant():
        assert reasons() == ()
        (reason,) = reasons(dropout_prob=0.5, dropout_seed=1)
    assert reason.startswith("batch_invariant: dropout_prob: ")
    assert reasons(dropout_prob=0.5, dropout_seed=1) == ()


def test_explain_says_what_the_block_promises_and_which_rule_chose_the_configuration():
    with batch_invariant():
        choice = explain(flash_attention, X, X, X).forward
    assert any(note.startswith("batch_invariant: ") for note in choice.notes)
    assert choice.tier == "heuristics"
    assert "batch_invariant" in choice.trail[-1]
    assert choice.config.batch_invariant
    assert "batch_invariant=True" in str(choice)
    outside = explain(flash_attention, X, X, X).forward
    assert not outside.config.batch_invariant
    assert "batch_invariant=" not in str(outside)


def test_no_measurement_and_no_entry_for_one_batch_is_asked_for_in_the_block():
    chain, op = ConfigSelectorChain(), registry().op("flash_attention")
    args, _ = op.bind((X, X, X), {})
    record = op.lower(args)

    def choose(plan):
        return chain.choose(plan.request(plan.choose_implementation(record, "forward"), record))

    plan = make_plan(op, args, None, None, chain)
    request = plan.request(plan.choose_implementation(record, "forward"), record)
    measured = dataclasses.replace(request.heuristic(), block_q=8)
    chain.cache.put(request.key(), measured)
    assert choose(plan).part == measured
    fixed = dataclasses.replace(plan, batch_invariant=True)
    with policy_override(cache_miss_fallback="autotune"), overlay_cache({request.key(): measured}):
        assert choose(fixed).part.block_q != 8
    with overlay_cache({"flash_attention": FlashAttentionConfig(fwd_params=FwdParams(q_blocksize=32))}):
        assert (choose(fixed).part.block_q, choose(fixed).part.batch_invariant) == (32, True)
    with pytest.raises(TunerError, match="batch_invariant"):
        chain.tune(fixed.request(fixed.choose_implementation(record, "forward"), record), lambda: record)


def test_a_claim_wants_a_known_name_and_a_rule():
    xla = next(i for i in registry().implementations["flash_attention"] if i.name == "xla")
    with pytest.raises(ValueError, match="invariant_to: got weather, wants names among batch"):
        dataclasses.replace(xla, invariant_to=frozenset({"weather"}))
    without_rule = dataclasses.replace(xla.config, batch_invariant=None)
    with pytest.raises(ValueError, match=r"wants a rule ConfigSpace\.batch_invariant"):
        dataclasses.replace(xla, config=without_rule)
    with pytest.raises(ValueError, match="invariant_priority: 'xla' of tiled_attention has a priority for each call"):
        dataclasses.replace(xla, priority=lambda record, device, direction: record.query.shape[0])


def test_a_priority_that_depends_on_the_batch_does_not_choose_in_the_block(monkeypatch):
    listed = registry().implementations["flash_attention"]
    xla = next(i for i in listed if i.name == "xla")

    def prefers_large_batches(record, device, direction):
        return record.query.shape[0] - 3

    large = dataclasses.replace(xla, name="large", priority=prefers_large_batches, invariant_priority=-1)
    monkeypatch.setitem(registry().implementations, "flash_attention", (xla, large))

    def chosen(x):
        return explain(flash_attention, x, x, x).forward.implementation.name

    large_batch = jnp.concatenate([X, X])
    assert [chosen(x) for x in (X[:1], large_batch)] == ["xla", "large"]
    with batch_invariant():
        assert [chosen(x) for x in (X[:1], large_batch)] == ["xla", "xla"]


def test_a_configuration_of_the_kernels_own_type_stays_invariant():
    outside = explain(flash_attention, X, X, X, platform="xla").forward.config
    assert not outside.batch_invariant
    with batch_invariant():
        decision = explain(flash_attention, X, X, X, platform="xla", cfg=FlashAttentionConfig(fwd_params=outside))
    assert decision.forward.config == dataclasses.replace(outside, batch_invariant=True)


def test_outputs_of_forward_mode_have_the_bits_of_the_call():
    x = jax.random.normal(jax.random.key(0), (1, 70, 2, 16))
    with batch_invariant(), forward_mode():
        rows = [jax.jvp(lambda q: flash_attention(q, x, x), (q,), (q,))[0] for q in (x, x[:, 41:42])]
        np.testing.assert_array_equal(rows[0][:, 41:42], rows[1])
        np.testing.assert_array_equal(rows[1], flash_attention(x[:, 41:42], x, x))


def test_tiles_of_several_rows_with_a_window_over_pages_are_refused():
    pages, tables, lengths = jnp.ones((3, 8, 1, 16)), jnp.array([[0, 1], [2, 0]]), jnp.array([9, 5])
    query, starts = jnp.ones((4, 1, 16)), jnp.array([0, 2, 4])
    config = RaggedPageAttentionv2Config(q_blocksize=8)
    prefill = functools.partial(ragged_page_attention_v2, sliding_window=3, cfg=config, platform="xla")
    with batch_invariant(), pytest.raises(ValueError, match="q_blocksize: got 8 in a batch_invariant block"):
        prefill(query, jnp.concatenate([pages, pages], 2), lengths, tables, starts, jnp.array([2]))


def test_all_reasons_of_a_refusal_are_listed(monkeypatch):
    listed = registry().implementations["attention"]
    limited = dataclasses.replace(listed[0], invariance_limits=lambda record: ["its tiles are too large"])
    monkeypatch.setitem(registry().implementations, "attention", (limited,))
    with batch_invariant():
        (verdict,) = explain(attention, X, X, X).forward.verdicts
    assert [x for x in verdict.reasons if "batch_invariant" in x] == [
        "batch_invariant: its rows may depend on batch, chunking, padding",
        "batch_invariant: its tiles are too large",
    ]
