"""Plugins: what is broken is reported and stops nobody, and the order of discovery decides nothing."""

import dataclasses
import itertools
from types import SimpleNamespace

import pluggy
import pytest
import toy
from toy import toy as call

import ejkernel
from ejkernel._version import __version__
from ejkernel.ops import hookimpl, plugins


def raising(error: BaseException):
    def load():
        raise error

    return load


def errors(registry) -> dict[str, str | None]:
    return {plugin.name: plugin.error for plugin in registry.plugins}


@pytest.mark.parametrize(
    "error", [ImportError("no libfoo"), ValueError("bad"), AttributeError("gone"), SystemExit(3)], ids=repr
)
def test_a_plugin_that_does_not_import_is_reported_and_the_rest_works(use, x, chain, error):
    registry = use(toy.entry_point("a-broken", raising(error)), toy.plugin(toy.implementation()))

    assert errors(registry) == {"a-broken": f"{type(error).__name__}: {error}", "toy": None}
    assert registry.failed[0].distribution == "a-broken-dist 1.0"
    assert call(x, chain=chain).shape == x.shape


def test_a_hook_that_raises_is_reported_and_the_rest_works(use):
    class Hooks:
        @hookimpl
        def ejkernel_implementations(self):
            raise RuntimeError("driver too old")

    registry = use(toy.entry_point("a-broken", Hooks), toy.plugin(toy.implementation()))

    assert errors(registry)["a-broken"] == "RuntimeError: driver too old"
    assert [i.name for i in registry.implementations["toy"]] == ["plain"]


def test_unreadable_metadata_of_a_plugin_is_reported_and_the_rest_works(use, x, chain):
    broken = toy.entry_point("a-broken", raising(AssertionError), requires=("@@ 1",))
    registry = use(broken, toy.plugin(toy.implementation()))

    assert errors(registry)["a-broken"].startswith("InvalidRequirement: ")
    assert call(x, chain=chain).shape == x.shape


def test_a_requirement_that_names_no_module_refuses_its_implementation_alone(use, x, chain):
    first = toy.implementation("malformed", priority=1)
    requires = dataclasses.replace(first.requires, modules=(">=3", "nowhere.at_all>=1"))
    use(toy.plugin(dataclasses.replace(first, requires=requires), toy.implementation()))

    assert call(x, chain=chain).shape == x.shape
    verdicts = ejkernel.explain(toy.OP, x).forward.verdicts
    reasons = next(verdict.reasons for verdict in verdicts if verdict.implementation.name == "malformed")
    assert any(reason.startswith("modules: got '>=3', wants a module") for reason in reasons)
    assert "module nowhere.at_all is not installed, needs >=1" in reasons


def test_a_misspelt_hook_is_reported(use):
    class Hooks:
        @hookimpl
        def ejkernel_implementation(self):
            return ()

    assert "ejkernel_implementation" in errors(use(toy.entry_point("typo", Hooks)))["typo"]


class HooksWithoutMarker:
    def ejkernel_implementations(self):
        return (toy.implementation(),)


class HookOfAnotherLibrary:
    @pluggy.HookimplMarker("other")
    def ejkernel_ops(self):
        return (toy.OP,)


class HookThatIsNoFunction:
    ejkernel_implementations = (toy.implementation(),)


@pytest.mark.parametrize(
    ("hooks", "error"),
    [
        (HooksWithoutMarker, "ejkernel_implementations: got a function without it, wants"),
        (HookOfAnotherLibrary, "ejkernel_ops: got a function without it, wants"),
        (HookThatIsNoFunction, "ejkernel_implementations: got a tuple, wants"),
    ],
)
def test_a_hook_without_its_decorator_is_reported_and_the_rest_works(use, x, hooks, error):
    registry = use(toy.entry_point("unmarked", hooks), toy.plugin(toy.implementation()))

    error = f"TypeError: {error} a function with the decorator @ejkernel.ops.hookimpl"
    assert errors(registry) == {"unmarked": error, "toy": None}
    assert error in str(ejkernel.explain("toy", x))


def test_a_hook_that_returns_something_else_is_reported(use):
    class Hooks:
        @hookimpl
        def ejkernel_implementations(self):
            return ("triton",)

    assert errors(use(toy.entry_point("odd", Hooks)))["odd"] == "TypeError: hook returned a str, wants Implementation"


def test_the_first_plugin_by_name_keeps_an_operation_declared_twice(use):
    first = toy.plugin(toy.implementation("same", platform="cuda"), name="a")
    second = toy.plugin(toy.implementation("same"), toy.implementation("own"), name="b")
    registry = use(second, first)

    assert errors(registry)["a"] is None
    assert "operation 'toy' is already declared" in errors(registry)["b"]
    assert {i.name: i.platform for i in registry.implementations["toy"]} == {
        "same": "cuda",
        "b-dist:same": "xla",
        "own": "xla",
    }


def test_two_plugins_of_one_name_are_reported(use):
    registry = use(toy.plugin(toy.implementation()), toy.plugin(toy.implementation("other")))

    assert [plugin.error for plugin in registry.plugins] == [None, "another plugin is already named 'toy'"]


def test_a_backend_for_another_core_is_refused_in_a_sentence(use, x):
    registry = use(
        toy.plugin(toy.implementation(), requires=("ejkernel-core~=99.0.0",)),
        toy.plugin(toy.implementation("fits"), name="fits", requires=(f"ejkernel-core=={__version__}", "numpy>=1")),
    )

    assert errors(registry) == {"toy": f"needs ejkernel-core ~=99.0.0, this is {__version__}", "fits": None}
    assert "plugin toy (toy-dist 1.0) not loaded: needs ejkernel-core ~=99.0.0" in str(ejkernel.explain("toy", x))


@pytest.mark.parametrize(("names", "loaded"), [("xla", ["xla"]), ("xla, cuda,", ["cuda", "xla"]), ("", [])])
def test_the_environment_limits_which_plugins_are_loaded(monkeypatch, names, loaded):
    found = [SimpleNamespace(name=name) for name in ("cuda", "triton", "xla")]
    monkeypatch.setattr(plugins.importlib.metadata, "entry_points", lambda group: found)
    monkeypatch.setenv("EJKERNEL_PLUGINS", names)

    assert [entry.name for entry in plugins._entry_points()] == loaded


def test_a_name_that_is_not_installed_is_a_plugin_that_did_not_load(monkeypatch):
    monkeypatch.setenv("EJKERNEL_PLUGINS", "xla,tritno")
    plugins.reload()
    try:
        (missing,) = plugins.registry().failed
        assert (missing.name, missing.distribution) == ("tritno", "unknown")
        assert "EJKERNEL_PLUGINS names it, and it is not installed; there are " in missing.error
        assert [plugin.name for plugin in plugins.registry().plugins] == ["xla", "tritno"]
    finally:
        plugins.reload()


def test_the_order_is_priority_then_name_whatever_the_order_of_discovery(use):
    declared = [
        toy.plugin(toy.implementation("b"), toy.implementation("z", priority=2), name="one"),
        toy.plugin(toy.implementation("a"), toy.implementation("c", priority=1), name="two", ops=()),
        toy.plugin(toy.implementation("d", priority=-1), name="three", ops=()),
    ]
    orders = {
        tuple(i.name for i in use(*permutation).implementations["toy"])
        for permutation in itertools.permutations(declared)
    }

    assert orders == {("z", "c", "a", "b", "d")}


def test_what_is_installed_loads_without_a_failure():
    plugins.reload()

    assert plugins.registry().failed == ()
    assert [i.name for i in plugins.registry().implementations["flash_attention"] if i.platform == "xla"] == ["xla"]
