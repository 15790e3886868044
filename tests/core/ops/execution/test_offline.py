"""T-4: calls that were traced are recorded, tuned afterwards, and eager calls then use what was measured."""

import dataclasses
import operator

import jax
import jax.numpy as jnp
import pytest
import toy
from jax.sharding import Mesh, PartitionSpec
from toy import ToyArguments, ToyConfig
from toy import toy as call

from ejkernel.ops import (
    AutotunePolicy,
    ConfigSelectorChain,
    FwdParams,
    PersistentCache,
    Tuner,
    TunerError,
    autotune_recorded,
    clear_recorded,
    get_recorded,
    record_calls,
    recording,
    tune_abstract,
)
from ejkernel.ops.call import make_plan
from ejkernel.ops.config.measurement import Measurement, TuningResult


@dataclasses.dataclass(frozen=True)
class Favouring:
    """A tuner that measures nothing and finds 16 fastest."""

    def tune(self, request, kernel_argument):
        part = request.implementation.config.candidates(request.record, request.device, request.direction)[0]
        return TuningResult(request.key(), request.implementation.name, (Measurement(part, 1.0),))


@pytest.fixture
def tuning(store):
    policy = AutotunePolicy(cache_miss_fallback="autotune")
    return ConfigSelectorChain(policy=policy, tuner=Favouring(), persistent=PersistentCache(store))


def test_a_traced_call_is_tuned_later_and_used_by_the_next_eager_call(plain, x, tuning, store):
    jax.jit(lambda x: call(x, chain=tuning))(x)
    assert toy.blocks(toy.seen()[-1]) == (64, 64)

    results = autotune_recorded()

    assert [result.key.direction for result in results] == ["forward", "backward"]
    assert set(PersistentCache(store).entries()) == {str(result.key) for result in results}
    call(x, chain=tuning)
    assert toy.blocks(toy.seen()[-1]) == (16, 64)


def test_an_eager_call_compiled_before_tuning_uses_what_was_measured(plain, x, store):
    chain = ConfigSelectorChain(tuner=Favouring())
    with record_calls():
        call(x, chain=chain)
    call(x, chain=chain)
    assert {toy.blocks(part) for part in toy.seen()} == {(64, 64)}

    autotune_recorded()
    call(x, chain=chain)

    assert toy.blocks(toy.seen()[-1]) == (16, 64)


def test_an_eager_gradient_compiled_before_tuning_uses_what_was_measured(plain, x, tuning):
    gradient = jax.grad(lambda x: call(x, chain=tuning).sum())
    gradient(x)
    autotune_recorded()
    gradient(x)

    assert [toy.blocks(part) for part in toy.seen("backward")] == [(64, 64), (16, 64)]


def test_a_call_compiled_earlier_is_recorded_when_recording_starts(plain, x, chain):
    jitted = jax.jit(lambda x: call(x, chain=chain))
    jitted(x)
    assert get_recorded() == ()

    with record_calls():
        jitted(x)

    assert len(get_recorded()) == 1


def test_a_call_recorded_by_two_executors_is_tuned_for_both(plain, x):
    chains = [ConfigSelectorChain(tuner=Favouring()) for _ in range(2)]
    with record_calls():
        for chain in chains:
            call(x, chain=chain)

    autotune_recorded()

    assert [chain.cache.size() for chain in chains] == [2, 2]


def test_a_call_is_recorded_once_regardless_of_its_cfg(plain, x, chain):
    with record_calls():
        for tile in (1, 2, 3):
            call(x, cfg=ToyConfig(fwd_params=FwdParams(q_blocksize=tile)), chain=chain)

    assert len(get_recorded()) == 1
    assert get_recorded()[0].plan.cfg is None


def test_a_recorded_sharded_call_is_tuned_at_shard_shapes(plain, tuning):
    mesh = Mesh(jax.devices()[:4], "d")
    specs = {"mesh": mesh, "in_specs": (PartitionSpec("d"),), "out_specs": PartitionSpec("d")}
    call(jnp.ones((16, 8)), chain=tuning, **specs)

    results = autotune_recorded(directions=("forward",))

    assert "x=float32[4,8]" in results[0].key.call
    call(jnp.ones((16, 8)), chain=tuning, **specs)
    assert toy.blocks(toy.seen()[-1]) == (16, 64)


def test_tuned_calls_leave_the_record(plain, x, tuning):
    jax.jit(lambda x: call(x, chain=tuning))(x)
    assert autotune_recorded() != []
    assert autotune_recorded() == []


def test_clear_recorded_forgets_recorded_calls(plain, x, tuning):
    jax.jit(lambda x: call(x, chain=tuning))(x)
    clear_recorded()

    assert autotune_recorded() == []


def test_autotune_recorded_tunes_the_other_calls_if_one_fails(use, x):
    chain = ConfigSelectorChain(tuner=Tuner(warmup_iterations=0, timing_iterations=1))
    wide = toy.implementation("wide", forward="toy:failing", extra=lambda r: () if r.x.shape[1] == 9 else ["not wide"])
    use(toy.plugin(wide, toy.implementation("narrow", extra=lambda r: ["wide"] if r.x.shape[1] == 9 else ())))
    with record_calls():
        with pytest.raises(RuntimeError, match="no room"):
            call(jnp.ones((4, 9)), chain=chain)
        call(x, chain=chain)

    with pytest.raises(TunerError, match=r"1 of 2 recorded calls(?s:.*)no candidate of toy forward wide ran"):
        autotune_recorded()

    assert set(map(operator.attrgetter("implementation"), chain.cache.keys())) == {"narrow@1.0"}
    assert len(get_recorded()) == 1


def test_nothing_is_tuned_under_a_trace(plain, x, tuning):
    def traced(y):
        jax.jit(lambda x: call(x, chain=tuning))(y)
        autotune_recorded()
        return y

    with pytest.raises(TunerError, match="under a trace"):
        jax.jit(traced)(x)


def test_an_abstract_call_is_tuned_on_generated_inputs(plain, chain):
    toy.MADE.clear()
    shapes = ToyArguments(x=jax.ShapeDtypeStruct((3, 5), jnp.float32))
    chain.tuner = Favouring()

    results = tune_abstract(make_plan(toy.OP, shapes, None, None, chain), shapes)

    assert [made.x for made in toy.MADE] == [((3, 5), "float32")]
    assert "x=float32[3,5]" in results[0].key.call


def test_autotune_recorded_shows_progress_with_show_progress(plain, x, tuning, capsys):
    jax.jit(lambda x: call(x, chain=tuning))(x)
    autotune_recorded(show_progress=True)

    assert "recorded calls: 100%" in capsys.readouterr().err


def test_recording_warns_when_it_exceeds_the_maximum_of_calls(plain, x, chain, monkeypatch):
    monkeypatch.setattr(recording, "MAX_RECORDED_CALLS", 1)
    with record_calls():
        call(x, chain=chain)
        with pytest.warns(recording.RecordingWarning, match="no more will be"):
            call(jnp.ones((8, 8)), chain=chain)
