"""Two distributions that give implementations the same name: both stay, and none evicts another."""

from types import SimpleNamespace

import jax
import pytest
import toy
from toy import toy as call

import ejkernel
from ejkernel.ops import hookimpl
from ejkernel.ops.config.key import ConfigKey
from ejkernel.ops.plugins import BUILT_IN_DISTRIBUTIONS


def plugin(distribution, *implementations, name=None):
    """A plugin of a distribution, which declares the toy operation if it is one of this project."""
    ops = (toy.OP,) if distribution in BUILT_IN_DISTRIBUTIONS else ()
    entry_point = toy.plugin(*implementations, name=name or distribution, ops=ops)
    entry_point.dist = SimpleNamespace(name=distribution, version="3.0", requires=[])
    return entry_point


def built_in(*implementations, **kwargs):
    return plugin("ejkernel-xla", *(implementations or (toy.implementation("xla"),)), **kwargs)


def names(registry):
    return [one.name for one in registry.implementations["toy"]]


@pytest.mark.parametrize("distribution", ["aaa", "zzz"])
def test_a_built_in_implementation_keeps_its_name_against_third_parties(use, distribution):
    registry = use(plugin(distribution, toy.implementation("xla", platform="cuda", priority=5)), built_in())

    assert names(registry) == [f"{distribution}:xla", "xla"]
    assert registry.versions["toy", "xla"] == "3.0"
    assert registry.plugin_by_implementation == {
        ("toy", "xla"): "ejkernel-xla",
        ("toy", f"{distribution}:xla"): distribution,
    }
    sentence = (
        f"implementation 'xla' of {distribution} is named '{distribution}:xla', because ejkernel-xla has an "
        "implementation 'xla'"
    )
    (loser,) = [one for one in registry.plugins if one.name == distribution]
    assert loser.error is None
    assert loser.notes == (f"{sentence} of toy",)
    assert registry.failed == ()


def test_implementations_of_one_name_can_both_be_chosen_and_explain_reports_the_clash(use, x, chain):
    use(plugin("aaa", toy.implementation("xla", platform="cuda", priority=5)), built_in())

    assert call(x, chain=chain).shape == x.shape
    assert call(x, platform="xla", chain=chain).shape == x.shape
    assert jax.grad(lambda x: call(x, chain=chain).sum())(x).shape == x.shape
    decision = ejkernel.explain("toy", x)
    assert decision.forward.implementation.name == "aaa:xla"
    assert "implementation 'xla' of aaa is named 'aaa:xla', because ejkernel-xla has" in str(decision)


def test_of_two_third_party_distributions_the_first_by_name_keeps_the_clashing_name(use):
    core = built_in(toy.implementation("own"))
    other = [plugin(name, toy.implementation("fast")) for name in ("bbb", "aaa")]

    assert sorted(names(use(core, *other))) == ["bbb:fast", "fast", "own"]


def test_a_plugin_cannot_take_the_name_of_a_built_in_plugin(use):
    registry = use(plugin("aaa", toy.implementation("fast"), name="xla"), built_in(name="xla"))

    assert [(one.name, one.error) for one in registry.plugins] == [("xla", None), ("aaa:xla", None)]
    assert sorted(names(registry)) == ["fast", "xla"]


def test_a_distribution_that_registers_one_name_twice_is_reported(use):
    registry = use(built_in(), plugin("aaa", toy.implementation("xla"), toy.implementation("xla")))

    (loser,) = registry.failed
    assert loser.error == "implementation 'xla' of toy is already declared"
    assert names(registry) == ["aaa:xla", "xla"]


def test_implementation_names_get_a_distribution_prefix_only_in_clashing_operations(use):
    class Hooks:
        @hookimpl
        def ejkernel_ops(self):
            return (toy.OP,)

        @hookimpl
        def ejkernel_implementations(self):
            return (toy.implementation("own"),)

    registry = use(toy.entry_point("core", Hooks), plugin("aaa", toy.implementation("xla")))
    assert names(registry) == ["own", "xla"]
    assert registry.renaming_notes == {}


def test_a_shipped_table_is_found_under_the_name_that_its_package_gave():
    kwargs = {"op": "toy@1", "direction": "forward", "device": "cpu", "schema": "0", "call": "x"}
    qualified = ConfigKey(implementation="aaa:xla@3.0", **kwargs)
    assert qualified.as_shipped_key() == ConfigKey(implementation="xla@3.0", **kwargs).as_shipped_key()
    assert str(qualified) != str(ConfigKey(implementation="xla@3.0", **kwargs))
