"""T-4: the tuner measures the device, never a trace, and reports what it did."""

import functools
import statistics

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy
from toy import ToyArguments, ToyConfig
from toy import toy as call

from ejkernel.ops import (
    AutotunePolicy,
    ConfigSelectorChain,
    DeviceInfo,
    FwdParams,
    NoConfigError,
    Tuner,
    TunerError,
    target_device,
)
from ejkernel.ops.call import make_plan
from ejkernel.ops.config import tuner as tuner_module
from ejkernel.ops.config.chain import TunerWarning
from ejkernel.ops.tuning import tune_call

QUICK = Tuner(warmup_iterations=0, timing_iterations=1)
TRANSFORMS = {
    "jit": jax.jit,
    "grad": lambda f: jax.grad(lambda x: f(x).sum()),
    "vmap": lambda f: lambda x: jax.vmap(f)(x[None]),
}


def tuning(**fields) -> ConfigSelectorChain:
    return ConfigSelectorChain(policy=AutotunePolicy(cache_miss_fallback="autotune"), tuner=QUICK, **fields)


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_tuner_refuses_to_measure_traced_arguments(plain, x, transform):
    def measured(x):
        QUICK.measure(lambda x: x, x)
        return x

    with pytest.raises(TunerError, match="under a trace"):
        TRANSFORMS[transform](measured)(x)


def test_tuner_refuses_to_measure_concrete_arguments_under_a_trace(plain, x):
    with pytest.raises(TunerError, match="under a trace"):
        jax.jit(lambda y: (QUICK.measure(lambda x: x, x), y)[1])(x)


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_a_traced_call_falls_back_to_heuristics_and_measures_nothing(plain, x, transform):
    chain = tuning()

    TRANSFORMS[transform](lambda x: call(x, chain=chain))(x)

    assert chain.cache.size() == 0
    assert {toy.blocks(part) for part in toy.seen()} == {(64, 64)}


def test_tuner_measures_device_time_rather_than_dispatch_time(use):
    slow, fast = (FwdParams(q_blocksize=blocks, kv_blocksize=64) for blocks in (1, 2))
    space = toy.space(lambda *_: slow, lambda *_: (slow, fast))
    use(toy.plugin(toy.implementation(forward="toy:slow_or_fast", config=space)))
    chain, x = ConfigSelectorChain(tuner=QUICK), jnp.ones((256, 256))

    result = QUICK.tune(toy.request(chain, x), ToyArguments(x=x))

    assert result.fastest.part == fast


def test_time_of_a_candidate_is_the_median_of_its_samples(monkeypatch):
    ticks = iter([0.0, 5.0, 10.0, 11.0, 20.0, 22.0])
    monkeypatch.setattr(tuner_module.time, "perf_counter", functools.partial(next, ticks))
    runs = []

    seconds = Tuner(warmup_iterations=4, timing_iterations=3).measure(runs.append, 0)

    assert seconds == statistics.median([5.0, 1.0, 2.0])
    assert len(runs) == 1 + 4 + 3


@pytest.fixture
def race(monkeypatch):
    """Lets candidates of given seconds a call race, by a clock that only they move; what ran, in order, and results.

    Candidates whose calls differ have several numbers, and the last one for all further calls.
    """

    def run(seconds, **options):
        now, order = [0.0], []
        monkeypatch.setattr(tuner_module.time, "perf_counter", lambda: now[0])

        def call(name, *took):
            now[0] += took[min(order.count(name), len(took) - 1)]
            order.append(name)

        contenders = [
            tuner_module._CandidateRun(
                part=name, run=functools.partial(call, name, *np.atleast_1d(took)), waits_for_each_call=False
            )
            for name, took in seconds.items()
        ]
        Tuner(warmup_iterations=0, **options)._measure_interleaved(contenders, lambda step: None)
        return order[len(seconds) :], [contender.measurement() for contender in contenders]

    return run


def test_candidates_are_timed_in_interleaved_rounds(race):
    order, measured = race({"a": 1.0, "b": 1.25, "c": 1.125}, timing_iterations=3)
    assert order == ["a", "b", "c", "c", "b", "a", "a", "b", "c"]
    assert [m.seconds for m in measured] == [1.0, 1.25, 1.125]


def test_a_clearly_slow_candidate_is_timed_for_two_rounds_only(race):
    order, measured = race({"a": 1.0, "b": 2.0}, timing_iterations=3)
    assert order == ["a", "b", "b", "a", "a"]
    assert [m.seconds for m in measured] == [1.0, 2.0]


def test_slow_first_samples_of_an_idle_device_are_outvoted(race):
    asleep = [4.0, 4.0, 1.0]  # the warm-up, the first sample, and all others
    _, (first, second) = race({"a": asleep, "b": 1.25}, timing_iterations=5)
    assert (first.seconds, second.seconds) == (1.0, 1.25)


def test_a_timing_sample_repeats_short_calls(race):
    order, (measured,) = race({"a": 2.0**-10}, timing_iterations=2)
    assert len(order) == 1 + 2 * 21  # the call that says how short calls are, and two samples of 20 ms
    assert measured.seconds == 2.0**-10


def test_calls_per_timing_sample_are_capped(race):
    order, _ = race({"a": 0.0}, timing_iterations=1)
    assert len(order) == 1 + tuner_module.MAX_CALLS_PER_SAMPLE


def test_candidates_that_fail_rank_after_those_that_run(use, x, monkeypatch):
    def sometimes(record, config):
        return toy.failing(record, config) if config.q_blocksize == 64 else toy.forward("some", record, config)

    monkeypatch.setattr(toy, "forward_sometimes", sometimes, raising=False)
    use(toy.plugin(toy.implementation("sometimes", blocks=(16,))))

    result = QUICK.tune(toy.request(ConfigSelectorChain(), x), ToyArguments(x=x))

    assert [m.part.q_blocksize for m in result.measurements] == [16, 64]
    assert "no room for a tile of 64" in result.measurements[-1].error


@pytest.fixture
def unrunnable(use):
    return use(toy.plugin(toy.implementation(forward="toy:failing", blocks=(16, 32))))


def test_an_error_lists_every_candidate_when_none_runs(unrunnable, x):
    with pytest.raises(TunerError) as caught:
        QUICK.tune(toy.request(ConfigSelectorChain(), x), ToyArguments(x=x))

    for tile in (16, 32, 64):
        assert f"no room for a tile of {tile}" in str(caught.value)


def test_a_call_whose_candidates_all_fail_uses_the_heuristic_and_warns_once(unrunnable, x):
    chain = tuning()

    with pytest.warns(TunerWarning, match="no candidate of toy forward plain ran"):
        selection = chain.choose(toy.request(chain, x), ToyArguments(x=x))
    assert selection.tier == "heuristics"
    assert any(step.startswith("autotune: failed, no candidate") for step in selection.trail)

    again = chain.choose(toy.request(chain, x), ToyArguments(x=x))  # a second warning would be an error
    assert any(step.startswith("autotune: failed earlier") for step in again.trail)


def test_a_call_whose_candidates_all_fail_raises_without_heuristics(unrunnable, x):
    policy = AutotunePolicy(cache_miss_fallback="autotune", allow_heuristics=False)
    chain = ConfigSelectorChain(policy=policy, tuner=QUICK)

    with pytest.warns(TunerWarning), pytest.raises(NoConfigError, match="autotune: failed"):
        call(x, chain=chain)


def test_a_call_for_another_device_is_not_measured_here(use, x):
    use(toy.plugin(toy.implementation(devices=frozenset({"gpu"}))))
    device = DeviceInfo(platform="gpu", vendor="nvidia", kind="NVIDIA H200", compute_capability=9.0)

    with target_device(device), pytest.raises(TunerError, match=r"NVIDIA H200.* cannot be measured on cpu"):
        QUICK.tune(toy.request(ConfigSelectorChain(), x), ToyArguments(x=x))


def test_forward_and_backward_are_tuned_and_stored_separately(plain, x):
    chain = ConfigSelectorChain(tuner=QUICK)
    args = ToyArguments(x=x)

    results = tune_call(make_plan(toy.OP, args, None, None, chain), args)

    assert [result.key.direction for result in results] == ["forward", "backward"]
    assert [type(result.fastest.part).__name__ for result in results] == ["FwdParams", "BwdParams"]
    assert [chain.cache.get(result.key) for result in results] == [result.winner.part for result in results]


def test_tune_call_raises_if_the_policy_disallows_autotuning(plain, x):
    chain = ConfigSelectorChain(policy=AutotunePolicy(allow_autotune=False), tuner=QUICK)
    args = ToyArguments(x=x)

    with pytest.raises(TunerError, match="policy"):
        tune_call(make_plan(toy.OP, args, None, None, chain), args)


def test_tuner_shows_progress_with_show_progress(plain, x, capsys):
    Tuner(warmup_iterations=0, timing_iterations=1, show_progress=True).tune(
        toy.request(ConfigSelectorChain(), x), ToyArguments(x=x)
    )
    QUICK.tune(toy.request(ConfigSelectorChain(), x), ToyArguments(x=x))

    shown = capsys.readouterr().err
    assert "toy forward plain" in shown
    assert "compiling" in shown
    assert "6/6" in shown  # each is compiled and measured


def test_an_eager_call_is_measured_once(plain, x):
    chain = tuning()

    call(x, chain=chain)
    traces = len(toy.SEEN)
    call(x, chain=chain)

    assert traces == 3 + 1  # the rule's, two candidates, and the call
    assert len(toy.SEEN) == traces


def test_tuning_one_call_retraces_no_other_compiled_call(plain, x):
    chain = tuning()
    call(x, chain=chain)
    call(jnp.ones((8, 8)), chain=chain)

    traces = len(toy.SEEN)
    call(x, chain=chain)

    assert len(toy.SEEN) == traces


def test_a_call_with_cfg_is_not_autotuned(plain, x):
    chain = tuning()

    call(x, cfg=ToyConfig(fwd_params=FwdParams(q_blocksize=7, kv_blocksize=9)), chain=chain)

    assert [toy.blocks(part) for part in toy.seen()] == [(7, 9)]


@pytest.mark.parametrize("fields", [{"warmup_iterations": -1}, {"timing_iterations": 0}])
def test_tuner_refuses_iteration_counts_out_of_range(fields):
    with pytest.raises(ValueError, match=next(iter(fields))):
        Tuner(**fields)
