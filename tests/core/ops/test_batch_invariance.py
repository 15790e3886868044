"""The policy under which the bits of a row do not depend on what else is in the call."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel import explain
from ejkernel.errors import NoImplementationError, TunerError
from ejkernel.modules import FlashAttentionConfig, flash_attention, lightning_attention
from ejkernel.ops import (
    ConfigSelectorChain,
    FwdParams,
    batch_invariant,
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
        decision = explain(lightning_attention, X, X, X, layer_idx=0, num_layers=2)
        with pytest.raises(NoImplementationError, match="batch_invariant: its rows may depend on batch"):
            lightning_attention(X, X, X, layer_idx=0, num_layers=2)
    reasons = {v.implementation.name: v.reasons for v in decision.forward.verdicts}
    assert reasons["xla"] == ("batch_invariant: its rows may depend on batch",)
    assert not any("batch_invariant" in reason for v in decision.backward.verdicts for reason in v.reasons)


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
    assert not explain(flash_attention, X, X, X).forward.config.batch_invariant


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
