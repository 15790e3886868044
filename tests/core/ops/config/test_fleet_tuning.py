"""What a fleet can trust: a winner that is ahead of the rule by more than noise, and predictions kept apart."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
import toy

from ejkernel.modules import flash_attention, grouped_matmul
from ejkernel.ops import (
    AutotunePolicy,
    ConfigSelectorChain,
    FwdParams,
    Measurement,
    PersistentCache,
    Tuner,
    TuningResult,
    clear_recorded,
    read_calls,
    record_calls,
    save_recorded,
)
from ejkernel.ops.config.table import Entry
from ejkernel.ops.config.tuner import spread
from ejkernel.ops.plugins import registry
from ejkernel.ops.recording import RecordedCall
from ejkernel.types import MaskInfo


@pytest.fixture(autouse=True)
def nothing_recorded():
    clear_recorded()
    yield
    clear_recorded()


def tile(size):
    return FwdParams(q_blocksize=size, kv_blocksize=size)


def result(*measured, rule):
    ranked = sorted(measured, key=lambda m: m.seconds)
    return TuningResult(key=None, implementation="plain", measurements=tuple(ranked), heuristic_part=rule)


def test_tuning_keeps_the_heuristic_config_within_timing_noise():
    rule, other = (Measurement(tile(size), seconds, spread=0.1) for size, seconds in ((8, 1.05), (16, 1.0)))
    assert result(rule, other, rule=tile(8)).winner is rule
    assert result(rule, other, rule=tile(8)).fastest is other


def test_a_candidate_faster_by_more_than_the_spread_wins():
    rule, other = (Measurement(tile(size), seconds, spread=0.04) for size, seconds in ((8, 1.05), (16, 1.0)))
    assert result(rule, other, rule=tile(8)).winner is other


def test_tuning_compares_with_the_larger_spread_of_both_configs():
    rule, other = Measurement(tile(8), 1.05, spread=0.01), Measurement(tile(16), 1.0, spread=0.06)
    assert result(rule, other, rule=tile(8)).winner is rule


def test_any_measured_candidate_beats_a_heuristic_config_that_failed():
    rule, other = Measurement(tile(8), None, "too large"), Measurement(tile(16), 1.0, spread=0.5)
    assert TuningResult(None, "plain", (other, rule), heuristic_part=tile(8)).winner is other


def test_timing_spread_is_the_interquartile_range():
    assert spread([1.0, 2.0, 3.0, 4.0, 100.0]) == 2.0
    assert spread([1.0]) == 0.0


def test_stored_entries_hold_timing_spread_and_sample_count(plain, x, store):
    chain = ConfigSelectorChain(tuner=Tuner(timing_iterations=3), persistent=PersistentCache(store))
    chain.tune(toy.request(chain, x), lambda: toy.ToyArguments(x=x))
    (entry,) = PersistentCache(store).entries().values()
    assert entry.samples >= 2
    assert entry.spread >= 0.0
    assert not entry.predicted


class Guess:
    """Predicts 16."""

    def tune(self, request, kernel_argument):
        return TuningResult(request.key(), request.implementation.name, (Measurement(tile(16), 1e-9),))


@pytest.fixture
def predicting(plain, x, store):
    chain = ConfigSelectorChain(tuner=Guess(), persistent=PersistentCache(store))
    chain.tune(toy.request(chain, x), lambda: None, predicted=True)
    return chain


def test_predicted_configs_have_their_own_file_and_never_count_as_measured(predicting, x, store):
    opened = PersistentCache(store)
    assert not opened.entries()
    assert [entry.predicted for entry in opened.predicted.entries().values()] == [True]
    assert opened.predicted.path != opened.path
    for chain in (predicting, ConfigSelectorChain(persistent=opened)):
        selection = chain.choose(toy.request(chain, x))
        assert (selection.tier, selection.part) == ("heuristics", tile(16))
        assert "predicted and not measured" in selection.trail[-1]
        assert not chain.cache.size()


def test_a_predicted_config_does_not_prevent_autotuning(predicting, x, store):
    policy = AutotunePolicy(cache_miss_fallback="autotune")
    chain = ConfigSelectorChain(policy=policy, tuner=Tuner(timing_iterations=1), persistent=PersistentCache(store))
    assert chain.choose(toy.request(chain, x), toy.ToyArguments(x=x)).tier == "autotune"
    fresh = ConfigSelectorChain(persistent=PersistentCache(store))
    assert fresh.choose(toy.request(fresh, x)).tier == "persistent"


def test_a_predicted_entry_among_measured_ones_is_ignored(plain, x, store):
    chain = ConfigSelectorChain(persistent=PersistentCache(store))
    key = str(toy.request(chain, x).key())
    PersistentCache(store).update({key: Entry({"q_blocksize": 2, "kv_blocksize": 2}, 1.0, predicted=True)})
    assert chain.choose(toy.request(chain, x)).trail[-1] == "heuristics: the implementation's rule"


# --- calls in files ---------------------------------------------------------------------------------------------------


def recorded(function, *arrays):
    with record_calls():
        jax.eval_shape(function, *arrays)


def array(*shape, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(shape, dtype)


def test_recorded_calls_round_trip_through_a_file(tmp_path):
    query, key = array(1, 64, 4, 16), array(1, 64, 2, 16)
    ids = array(1, 64, dtype=jnp.int32)
    recorded(lambda q, k: flash_attention(q, k, k, causal=True, sliding_window=(8, 0), logits_soft_cap=5.0), query, key)
    recorded(lambda q, k, i: flash_attention(q, k, k, mask_info=MaskInfo.from_segments(i)), query, key, ids)
    recorded(grouped_matmul, array(32, 16), array(4, 16, 8), array(4, dtype=jnp.int32))
    path = tmp_path / "calls.json"
    assert save_recorded(path) == 3
    first, second, third = read_calls(path)
    assert first.args.query == query
    assert (first.args.causal, first.args.sliding_window) == (True, (8, 0))
    assert second.args.mask_info.explicit_q_segment_ids == ids
    assert second.args.mask_info.explicit_mask is None
    assert (third.op.name, third.args.group_sizes.dtype) == ("grouped_matmul", jnp.int32)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[]", 'wants {"calls"'),
        ('{"calls": [{"op": "flash", "arguments": {}}]}', "call 1: .*no operation 'flash'"),
        (
            '{"calls": [{"op": "mean_pooling", "arguments": {"colour": 1}}]}',
            "mean_pooling has no argument colour",
        ),
        ('{"calls": [{"op": "mean_pooling", "arguments": {"x": {"red": 1}}}]}', "call 1: got {'red': 1}, wants one of"),
    ],
)
def test_errors_of_a_malformed_calls_file_say_where(tmp_path, content, message):
    path = tmp_path / "calls.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=message):
        read_calls(path)


def test_saving_calls_names_an_argument_that_cannot_be_serialized(tmp_path):
    op = registry().op("state_space_v1")
    made = [jax.eval_shape(case.make, jax.random.key(0)) for case in op.cases]
    args = next(args for args in made if args.act_fn is not None)
    call = RecordedCall(SimpleNamespace(op=op, platform="auto"), args)
    with pytest.raises(ValueError, match=r"state_space_v1: act_fn: got a .*, which cannot be written"):
        save_recorded(tmp_path / "calls.json", [call])
    assert not (tmp_path / "calls.json").exists()
