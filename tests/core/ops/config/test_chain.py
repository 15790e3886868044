"""The seven tiers answer in order, and each says what it did."""

import dataclasses
import json

import jax
import pytest
import toy
from toy import ToyArguments, ToyConfig
from toy import toy as call

import ejkernel
from ejkernel.ops import (
    AutotunePolicy,
    ConfigSelectorChain,
    FwdParams,
    NoConfigError,
    PersistentCache,
    StoreWarning,
    Tuner,
    model,
    overlay_cache,
    policy_override,
)
from ejkernel.ops.config import table
from ejkernel.ops.config.table import table_name


def tile(size: int) -> FwdParams:
    return FwdParams(q_blocksize=size, kv_blocksize=size)


@pytest.fixture
def shipping(use, tmp_path, monkeypatch):
    """An implementation that ships a table, in which the tiles are 5."""

    def ship(content: str | None = None) -> None:
        use(toy.plugin(toy.implementation(package="toy_tables")))
        package = tmp_path / "toy_tables"
        request = toy.request(ConfigSelectorChain(), jax.numpy.ones((4, 8)))
        file = package / "tuned" / table_name(request.key().device, "toy")
        file.parent.mkdir(parents=True)
        (package / "__init__.py").touch()
        entry = {"config": {"q_blocksize": 5, "kv_blocksize": 5}, "seconds": 1.0}
        shipped = json.dumps({"entries": {request.key().as_shipped_key(): entry}, "format": 1})
        file.write_text(shipped if content is None else content)
        monkeypatch.syspath_prepend(str(tmp_path))
        monkeypatch.delitem(__import__("sys").modules, "toy_tables", raising=False)
        forget()

    def forget() -> None:
        table._shipped_table.cache_clear()
        model._shipped_folder.cache_clear()

    yield ship
    forget()


def test_each_config_tier_takes_precedence_over_later_ones(shipping, x, store):
    shipping()
    policy = AutotunePolicy(cache_miss_fallback="autotune")
    chain = ConfigSelectorChain(policy=policy, persistent=PersistentCache(store))
    request = toy.request(chain, x)

    def asked(argument=None, **options) -> tuple[str, int, list[str]]:
        fresh = ConfigSelectorChain(
            chain.cache if options.pop("memory", False) else None, policy, Tuner(), chain.persistent
        )
        selection = fresh.choose(toy.request(fresh, x, **options), argument)
        return selection.tier, selection.part.q_blocksize, [step.partition(":")[0] for step in selection.trail]

    tiers = ["override", "overlay", "memory", "persistent", "autotune", "heuristics"]
    chain.store(request.key(), tile(4), 1.0, "")
    chain.cache.put(request.key(), tile(3))
    with overlay_cache({"toy": ToyConfig(fwd_params=tile(2))}):
        assert asked(cfg=ToyConfig(fwd_params=tile(1)), memory=True) == ("override", 1, tiers[:1])
        assert asked(memory=True) == ("overlay", 2, tiers[:2])
    assert asked(memory=True) == ("memory", 3, tiers[:3])
    assert asked() == ("persistent", 4, tiers[:4])
    chain.persistent.clear()
    assert asked() == ("persistent", 5, tiers[:4])


def test_autotune_and_heuristics_follow_the_stores(plain, x):
    chain = ConfigSelectorChain(policy=AutotunePolicy(cache_miss_fallback="autotune"), tuner=Tuner())
    request = toy.request(chain, x)

    ruled = chain.choose(request)
    assert (ruled.tier, ruled.part.q_blocksize) == ("heuristics", 64)
    assert ruled.trail[-2:] == (
        "autotune: on, but a traced call cannot be measured; tune the call eagerly or offline",
        "heuristics: the implementation's rule",
    )
    measured = chain.choose(request, ToyArguments(x=x))
    assert measured.tier == "autotune"
    assert measured.trail[-1] == "autotune: measured now"
    assert chain.choose(request).tier == "memory"


def test_trail_has_a_sentence_for_each_tier(plain, x, chain):
    assert chain.choose(toy.request(chain, x)).trail == (
        "override: no cfg=",
        "overlay: none active",
        "memory: no entry",
        "persistent: no entry in the user store or a shipped table",
        "autotune: not tried, cache_miss_fallback of the policy is 'heuristics'",
        "heuristics: the implementation's rule",
    )


def test_no_config_error_names_the_call_and_the_trail(plain, x):
    chain = ConfigSelectorChain(policy=AutotunePolicy(allow_heuristics=False))
    request = toy.request(chain, x)

    with pytest.raises(NoConfigError) as caught:
        call(x, chain=chain)

    lines = str(caught.value).splitlines()
    assert str(request.key()) in lines[0]
    assert [line.strip().partition(":")[0] for line in lines[1:]] == [
        "override",
        "overlay",
        "memory",
        "persistent",
        "autotune",
        "heuristics",
    ]


@pytest.mark.parametrize(
    ("fallback", "outcome"),
    [("heuristics", "the call fails"), ("autotune", "an eager call measures one, a traced call fails")],
)
def test_explain_shows_the_last_tier_instead_of_raising(plain, x, fallback, outcome):
    with policy_override(allow_heuristics=False, cache_miss_fallback=fallback):
        decision = ejkernel.explain("toy", x)
    for choice in (decision.forward, decision.backward):
        assert (choice.tier, choice.config, choice.implementation.name) == ("error", None, "plain")
        assert choice.trail[-1] == f"error: no tier has a configuration: {outcome}"
    assert "config from error: nothing" in str(decision)


def test_explain_says_that_an_eager_call_would_be_measured(plain, x):
    with policy_override(cache_miss_fallback="autotune"):
        choice = ejkernel.explain("toy", x).forward
    assert choice.tier == "heuristics"
    assert "autotune: on, and not tried here: an eager call is measured, a traced one cannot be" in choice.trail


def test_the_user_store_wins_over_the_shipped_table(shipping, x, store):
    shipping()
    chain = ConfigSelectorChain(persistent=PersistentCache(store))
    request = toy.request(chain, x)

    assert chain.choose(request).trail[-1] == "persistent: shipped table"
    PersistentCache(store).put(request.key(), tile(4), 1.0)
    other = ConfigSelectorChain(persistent=PersistentCache(store))
    assert other.choose(request).trail[-1] == "persistent: user store"


def test_calls_of_one_shared_tuning_key_use_one_shipped_entry(shipping, use, x):
    shipping()
    space = dataclasses.replace(toy.implementation().config, kind=lambda record: f"x={record.x.dtype}[4,8]")
    use(toy.plugin(toy.implementation(package="toy_tables", config=space)))

    for other in (x, jax.numpy.ones((40, 80))):
        selection = ConfigSelectorChain().choose(toy.request(ConfigSelectorChain(), other))
        assert (selection.trail[-1], selection.part.q_blocksize) == ("persistent: shipped table", 5)


@pytest.mark.parametrize("content", ["", "{", '{"entries": {}, "format": 9}', '{"entries": 3}'])
def test_a_damaged_shipped_table_is_ignored_with_a_warning(shipping, x, content):
    shipping(content)
    chain = ConfigSelectorChain()

    with pytest.warns(StoreWarning, match="toy_tables:tuned/.* is ignored"):
        assert chain.choose(toy.request(chain, x)).tier == "heuristics"


def test_a_missing_shipped_table_falls_through_to_heuristics(use, x):
    use(toy.plugin(toy.implementation(package="json")))
    chain = ConfigSelectorChain()

    assert chain.choose(toy.request(chain, x)).tier == "heuristics"


def test_store_reads_fill_the_memory_cache_without_recompiling(plain, x, store):
    chain = ConfigSelectorChain(persistent=PersistentCache(store))
    PersistentCache(store).put(toy.request(chain, x).key(), tile(4), 1.0)
    generation = chain.cache.generation

    call(x, chain=chain)
    call(x, chain=chain)

    assert chain.cache.keys() == (toy.request(chain, x).key(),)
    assert chain.cache.generation == generation
    assert [toy.blocks(part) for part in toy.seen()] == [(4, 4)]


def test_explain_names_the_tier_of_both_passes(plain, x):
    with overlay_cache({"toy": ToyConfig(fwd_params=tile(2))}):
        decision = ejkernel.explain("toy", x)

    assert (decision.forward.tier, decision.backward.tier) == ("overlay", "heuristics")
    assert "config from overlay: q_blocksize=2, kv_blocksize=2" in str(decision.forward)


def test_the_default_is_heuristics_on_a_miss(plain, x):
    assert AutotunePolicy().cache_miss_fallback == "heuristics"
    call(x)
    assert [toy.blocks(part) for part in toy.seen()] == [(64, 64)]


def test_nothing_is_measured_for_an_explanation(plain, x):
    with policy_override(cache_miss_fallback="autotune"):
        decision = ejkernel.explain("toy", x)

    assert decision.forward.tier == "heuristics"
    assert toy.SEEN == []
