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
def test_it_refuses_to_measure_under_a_trace(plain, x, transform):
    def measured(x):
        QUICK.measure(lambda x: x, x)
        return x

    with pytest.raises(TunerError, match="under a trace"):
        TRANSFORMS[transform](measured)(x)


def test_it_refuses_even_where_no_argument_is_traced(plain, x):
    with pytest.raises(TunerError, match="under a trace"):
        jax.jit(lambda y: (QUICK.measure(lambda x: x, x), y)[1])(x)


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_a_traced_call_falls_back_to_heuristics_and_measures_nothing(plain, x, transform):
    chain = tuning()

    TRANSFORMS[transform](lambda x: call(x, chain=chain))(x)

    assert chain.cache.size() == 0
    assert {toy.blocks(part) for part in toy.seen()} == {(64, 64)}


def test_work_on_the_device_counts_and_not_the_length_of_the_program(use):
    slow, fast = (FwdParams(q_blocksize=blocks, kv_blocksize=64) for blocks in (1, 2))
    space = toy.space(lambda *_: slow, lambda *_: (slow, fast))
    use(toy.plugin(toy.implementation(forward="toy:slow_or_fast", config=space)))
    chain, x = ConfigSelectorChain(tuner=QUICK), jnp.ones((256, 256))

    result = QUICK.tune(toy.request(chain, x), ToyArguments(x=x))

    assert result.best.part == fast


def test_the_time_of_a_candidate_is_the_median_of_its_repeats(monkeypatch):
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
            tuner_module._Contender(part=name, run=functools.partial(call, name, *np.atleast_1d(took)), alone=False)
            for name, took in seconds.items()
        ]
        Tuner(warmup_iterations=0, **options)._measure_interleaved(contenders, lambda step: None)
        return order[len(seconds) :], [contender.measurement() for contender in contenders]

    return run


def test_candidates_take_turns(race):
    order, measured = race({"a": 1.0, "b": 1.25, "c": 1.125}, timing_iterations=3)
    assert order == ["a", "b", "c", "c", "b", "a", "a", "b", "c"]
    assert [m.seconds for m in measured] == [1.0, 1.25, 1.125]


def test_a_candidate_that_is_clearly_slow_runs_two_rounds(race):
    order, measured = race({"a": 1.0, "b": 2.0}, timing_iterations=3)
    assert order == ["a", "b", "b", "a", "a"]
    assert [m.seconds for m in measured] == [1.0, 2.0]


def test_a_device_that_wakes_up_slowly_costs_nobody_the_race(race):
    asleep = [4.0, 4.0, 1.0]  # the warm-up, the first sample, and all others
    _, (first, second) = race({"a": asleep, "b": 1.25}, timing_iterations=5)
    assert (first.seconds, second.seconds) == (1.0, 1.25)


def test_a_sample_of_short_calls_is_many_of_them(race):
    order, (measured,) = race({"a": 2.0**-10}, timing_iterations=2)
    assert len(order) == 1 + 2 * 21  # the call that says how short calls are, and two samples of 20 ms
    assert measured.seconds == 2.0**-10


def test_no_sample_is_endless(race):
    order, _ = race({"a": 0.0}, timing_iterations=1)
    assert len(order) == 1 + tuner_module.MAX_CALLS_PER_SAMPLE


def test_candidates_that_do_not_run_lose_to_those_that_do(use, x, monkeypatch):
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


def test_a_call_that_cannot_be_tuned_goes_on_with_the_rule_and_says_so_once(unrunnable, x):
    chain = tuning()

    with pytest.warns(TunerWarning, match="no candidate of toy forward plain ran"):
        selection = chain.choose(toy.request(chain, x), ToyArguments(x=x))
    assert selection.tier == "heuristics"
    assert any(step.startswith("autotune: failed, no candidate") for step in selection.trail)

    again = chain.choose(toy.request(chain, x), ToyArguments(x=x))  # a second warning would be an error
    assert any(step.startswith("autotune: failed earlier") for step in again.trail)


def test_a_call_that_cannot_be_tuned_is_an_error_where_rules_may_not_decide(unrunnable, x):
    policy = AutotunePolicy(cache_miss_fallback="autotune", allow_heuristics=False)
    chain = ConfigSelectorChain(policy=policy, tuner=QUICK)

    with pytest.warns(TunerWarning), pytest.raises(NoConfigError, match="autotune: failed"):
        call(x, chain=chain)


def test_a_call_for_another_device_is_not_measured_here(use, x):
    use(toy.plugin(toy.implementation(devices=frozenset({"gpu"}))))
    device = DeviceInfo(platform="gpu", vendor="nvidia", kind="NVIDIA H200", compute_capability=9.0)

    with target_device(device), pytest.raises(TunerError, match=r"NVIDIA H200.* cannot be measured on cpu"):
        QUICK.tune(toy.request(ConfigSelectorChain(), x), ToyArguments(x=x))


def test_the_two_passes_are_tuned_and_stored_each_by_itself(plain, x):
    chain = ConfigSelectorChain(tuner=QUICK)
    args = ToyArguments(x=x)

    results = tune_call(make_plan(toy.OP, args, None, None, chain), args)

    assert [result.key.direction for result in results] == ["forward", "backward"]
    assert [type(result.best.part).__name__ for result in results] == ["FwdParams", "BwdParams"]
    assert [chain.cache.get(result.key) for result in results] == [result.winner.part for result in results]


def test_a_policy_against_measuring_holds_for_requests_too(plain, x):
    chain = ConfigSelectorChain(policy=AutotunePolicy(allow_autotune=False), tuner=QUICK)
    args = ToyArguments(x=x)

    with pytest.raises(TunerError, match="policy"):
        tune_call(make_plan(toy.OP, args, None, None, chain), args)


def test_progress_is_shown_when_asked(plain, x, capsys):
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


def test_tuning_one_call_leaves_compiled_ones_alone(plain, x):
    chain = tuning()
    call(x, chain=chain)
    call(jnp.ones((8, 8)), chain=chain)

    traces = len(toy.SEEN)
    call(x, chain=chain)

    assert len(toy.SEEN) == traces


def test_a_configuration_of_the_call_is_not_measured(plain, x):
    chain = tuning()

    call(x, cfg=ToyConfig(fwd_params=FwdParams(q_blocksize=7, kv_blocksize=9)), chain=chain)

    assert [toy.blocks(part) for part in toy.seen()] == [(7, 9)]


@pytest.mark.parametrize("fields", [{"warmup_iterations": -1}, {"timing_iterations": 0}])
def test_a_tuner_without_runs_is_refused(fields):
    with pytest.raises(ValueError, match=next(iter(fields))):
        Tuner(**fields)
