"""T-2: an override holds for its own call; neither it nor a rule's choice is kept, in memory or on disk."""

import jax
import pytest
import toy
from toy import ToyConfig
from toy import toy as call

from ejkernel.ops import (
    AutotunePolicy,
    BwdParams,
    ConfigSelectorChain,
    FwdParams,
    PersistentCache,
    overlay_cache,
    policy_override,
)

OWN = ToyConfig(fwd_params=FwdParams(q_blocksize=7, kv_blocksize=9), bwd_params=BwdParams(q_blocksize=7))


@pytest.fixture
def kept(store):
    return ConfigSelectorChain(persistent=PersistentCache(store))


def test_cfg_of_one_call_does_not_affect_the_next(plain, x, kept):
    call(x, cfg=OWN, chain=kept)
    call(x, chain=kept)

    assert [toy.blocks(part) for part in toy.seen()] == [(7, 9), (64, 64)]


def test_cfg_under_autotuning_is_not_cached_for_later_calls(plain, x, store):
    tuning = ConfigSelectorChain(
        policy=AutotunePolicy(cache_miss_fallback="autotune"), persistent=PersistentCache(store)
    )

    call(x, cfg=OWN, chain=tuning)
    assert tuning.cache.size() == 0
    call(x, chain=tuning)

    assert tuning.cache.size() == 1
    assert toy.blocks(toy.seen()[-1]) != (7, 9)


@pytest.mark.parametrize("source", ["override", "overlay", "heuristics"])
def test_nothing_that_was_not_measured_is_stored(plain, x, kept, store, source):
    cfg = OWN if source == "override" else None
    with overlay_cache({"toy": OWN} if source == "overlay" else {}):
        jax.grad(lambda x: call(x, cfg=cfg, chain=kept).sum())(x)

    assert kept.cache.size() == 0
    assert not store.exists()


def test_autotuning_enabled_after_heuristics_still_tunes(plain, x, kept, store):
    call(x, chain=kept)
    with policy_override(cache_miss_fallback="autotune"):
        call(x, chain=kept)

    (key,) = kept.cache.keys()
    assert key.direction == "forward"
    assert list(PersistentCache(store).entries()) == [str(key)]


def test_a_call_first_made_inside_an_overlay_is_autotuned_outside(plain, x, kept):
    with policy_override(cache_miss_fallback="autotune"):
        with overlay_cache({"toy": OWN}):
            call(x, chain=kept)
        assert kept.cache.size() == 0
        call(x, chain=kept)

    assert kept.cache.size() == 1


def test_a_cleared_configuration_is_measured_again(plain, x, chain):
    with policy_override(cache_miss_fallback="autotune"):
        call(x, chain=chain)
        chain.cache.clear()
        call(x, chain=chain)

    assert chain.cache.size() == 1
