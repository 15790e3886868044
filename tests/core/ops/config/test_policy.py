"""Policies: overrides nest, stay on their thread and are part of every compiled function's key."""

import dataclasses
import threading

import jax
import pytest
import toy
from toy import toy as call

from ejkernel.ops import AutotunePolicy, ConfigSelectorChain, NoConfigError, policy_override
from ejkernel.ops.config.policy import effective_policy


def test_overrides_nest_field_by_field():
    base = AutotunePolicy()
    with policy_override(allow_heuristics=False):
        with policy_override(cache_miss_fallback="autotune"):
            assert effective_policy(base) == AutotunePolicy(allow_heuristics=False, cache_miss_fallback="autotune")
        with policy_override(allow_heuristics=True):
            assert effective_policy(base) == base
        assert effective_policy(base) == AutotunePolicy(allow_heuristics=False)
    assert effective_policy(base) is base


def test_an_override_changes_no_policy_object():
    base = AutotunePolicy()
    before = dataclasses.asdict(base)
    with policy_override(allow_heuristics=False):
        effective_policy(base)

    assert dataclasses.asdict(base) == before
    with pytest.raises(dataclasses.FrozenInstanceError):
        base.allow_heuristics = False


@pytest.mark.parametrize(
    ("updates", "message"),
    [
        ({"allow_autotuning": True}, "AutotunePolicy has no field allow_autotuning"),
        ({"cache_miss_fallback": "guess"}, "cache_miss_fallback: got 'guess'"),
        ({"allow_heuristics": "no"}, "allow_heuristics: got 'no'"),
    ],
)
def test_a_field_or_value_that_does_not_exist_is_refused(updates, message):
    with pytest.raises(ValueError, match=message), policy_override(**updates):
        pass


def test_a_function_jitted_outside_is_traced_again_inside(plain, x, chain):
    jitted = jax.jit(lambda x: call(x, chain=chain))
    jitted(x)

    with policy_override(allow_heuristics=False), pytest.raises(NoConfigError):
        jitted(x)
    jitted(x)
    assert len(toy.SEEN) == 1


def test_an_eager_call_is_decided_again_inside_a_policy_override(plain, x, chain):
    call(x, chain=chain)

    with policy_override(allow_heuristics=False), pytest.raises(NoConfigError):
        call(x, chain=chain)


def test_the_first_policy_override_retraces_no_jitted_function():
    """A jit context that joins late changes the key of every function there is."""
    traces = []
    jitted = jax.jit(lambda x: (traces.append(x), x)[1])
    jitted(1.0)
    with policy_override(allow_heuristics=False):
        pass
    jitted(1.0)

    assert len(traces) == 1


def test_threads_do_not_see_each_others_overrides():
    barrier, seen = threading.Barrier(4, timeout=600), {}

    def work(fallback: str, number: int) -> None:
        for _ in range(50):
            with policy_override(cache_miss_fallback=fallback):
                barrier.wait()
                seen.setdefault(number, set()).add(effective_policy(AutotunePolicy()).cache_miss_fallback)

    threads = [threading.Thread(target=work, args=(("autotune", "heuristics")[i % 2], i)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert seen == {0: {"autotune"}, 1: {"heuristics"}, 2: {"autotune"}, 3: {"heuristics"}}


def test_a_chain_that_disallows_autotuning_never_measures(plain, x):
    policy = AutotunePolicy(allow_autotune=False, cache_miss_fallback="autotune")
    chain = ConfigSelectorChain(policy=policy)

    call(x, chain=chain)

    assert chain.cache.size() == 0
    assert [toy.blocks(part) for part in toy.seen()] == [(64, 64)]


def test_policy_override_of_one_chain_does_not_affect_others(x):
    mine, other = ConfigSelectorChain(), ConfigSelectorChain()

    def both(field):
        return tuple(getattr(effective_policy(chain.policy, chain), field) for chain in (mine, other))

    with policy_override(mine, allow_heuristics=False):
        assert both("allow_heuristics") == (False, True)
        with policy_override(allow_heuristics=True, validate_backward=False):
            assert both("allow_heuristics") == (True, True)
            with policy_override(mine, validate_backward=True):
                assert both("validate_backward") == (True, False)
        assert both("allow_heuristics") == (False, True)
    assert both("allow_heuristics") == (True, True)
    with pytest.raises(ValueError, match="selector: got str, wants a ConfigSelectorChain"), policy_override("mine"):
        pass
