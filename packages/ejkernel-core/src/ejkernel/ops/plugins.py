"""Finding backends: two hooks, both data, and loading that no broken plugin can stop."""

import dataclasses
import functools
import importlib.metadata
import os
from collections.abc import Callable, Iterable
from typing import Any

import pluggy

from ejkernel._version import __version__
from ejkernel.ops.model import Implementation, Op

GROUP = "ejkernel"
hookspec = pluggy.HookspecMarker(GROUP)
hookimpl = pluggy.HookimplMarker(GROUP)


class Hooks:
    """What a backend may provide. A hook module must import without its toolchain."""

    @hookspec
    def ejkernel_implementations(self) -> Iterable[Implementation]:  # type: ignore[empty-body]
        """Implementations of operations."""

    @hookspec
    def ejkernel_ops(self) -> Iterable[Op]:  # type: ignore[empty-body]
        """Operations beyond those of the core."""


@dataclasses.dataclass(frozen=True)
class Plugin:
    """One discovered entry point.

    Attributes:
        name: Entry-point name.
        distribution: `"name version"` of the distribution it came from.
        error: Why it does not serve, or None.
    """

    name: str
    distribution: str
    error: str | None = None


@dataclasses.dataclass(frozen=True)
class Registry:
    """Everything that was found.

    Attributes:
        ops: Name -> operation.
        implementations: Operation name -> implementations, best first.
        plugins: All entry points, in the order they were loaded.
        versions: (operation, implementation name) -> version of the distribution it came from.
        providers: (operation, implementation name) -> name of the plugin it came from.
    """

    ops: dict[str, Op]
    implementations: dict[str, tuple[Implementation, ...]]
    plugins: tuple[Plugin, ...]
    versions: dict[tuple[str, str], str]
    providers: dict[tuple[str, str], str]

    @property
    def failed(self) -> tuple[Plugin, ...]:
        """Plugins that do not serve, wholly or in part."""
        return tuple(plugin for plugin in self.plugins if plugin.error)

    def op(self, what: Any) -> Op:
        """The operation named by its id, its public function, its Kernel class or instance, or itself.

        Raises:
            ValueError: Nothing of the kind is registered.
        """
        what = getattr(what, "op", what)
        for op in self.ops.values():
            if what is op or what is op.function or what == op.name:
                return op
        raise ValueError(f"op: no operation {what!r}; there are {', '.join(sorted(self.ops))}")


@functools.cache
def registry() -> Registry:
    """Discovers and loads the plugins, once per process. `EJKERNEL_PLUGINS=a,b` limits loading to those names."""
    return load(_entry_points())


def reload() -> None:
    """Forgets what was found, so that the next call discovers again."""
    registry.cache_clear()


def load(entry_points: Iterable[importlib.metadata.EntryPoint]) -> Registry:
    """Loads entry points one by one, in name order; a failure is noted and the rest goes on."""
    from ejkernel.modules.operations import OPS

    collected = _Collected({op.name: op for op in OPS})
    names: set[str] = set()
    for entry_point in sorted(entry_points, key=lambda e: (e.name, _distribution(e))):
        source = _distribution(entry_point)
        duplicate = f"another plugin is already named {entry_point.name!r}" if entry_point.name in names else None
        names.add(entry_point.name)
        error = duplicate or _version_error(entry_point) or collected.add(entry_point)
        collected.plugins.append(Plugin(entry_point.name, source, error))
    return collected.registry()


class _Collected:
    """Accumulates what the plugins declare and orders it at the end."""

    def __init__(self, ops: dict[str, Op]) -> None:
        self.ops = ops
        self.plugins: list[Plugin] = []
        self.found: dict[tuple[str, str], Implementation] = {}
        self.versions: dict[tuple[str, str], str] = {}
        self.providers: dict[tuple[str, str], str] = {}

    def add(self, entry_point: importlib.metadata.EntryPoint) -> str | None:
        """Takes in one plugin; returns what was wrong with it."""
        try:
            ops, implementations = _declarations(entry_point)
        except Exception as error:  # noqa: BLE001 - a plugin may fail in any way, and must not take others along
            return f"{type(error).__name__}: {error}"
        problems = [f"operation {op.name!r} is already declared" for op in ops if op.name in self.ops]
        self.ops |= {op.name: op for op in ops if op.name not in self.ops}
        version = entry_point.dist.version if entry_point.dist else "unknown"
        for implementation in implementations:
            key = (implementation.op, implementation.name)
            if key in self.found:
                problems.append(f"implementation {key[1]!r} of {key[0]} is already declared")
                continue
            self.found[key] = implementation
            self.versions[key] = version
            self.providers[key] = entry_point.name
        return "; ".join(problems) or None

    def registry(self) -> Registry:
        ranked = sorted(self.found.values(), key=lambda i: (-i.priority, i.name))
        by_op = {name: tuple(i for i in ranked if i.op == name) for name in {i.op for i in ranked} | set(self.ops)}
        return Registry(self.ops, by_op, tuple(self.plugins), self.versions, self.providers)


def _declarations(entry_point: importlib.metadata.EntryPoint) -> tuple[list[Op], list[Implementation]]:
    # A manager for each plugin: one that raises, or misspells a hook, cannot affect the calls of the others.
    manager = pluggy.PluginManager(GROUP)
    manager.add_hookspecs(Hooks)
    manager.register(entry_point.load(), name=entry_point.name)
    manager.check_pending()
    return (
        _typed(manager.hook.ejkernel_ops, Op),
        _typed(manager.hook.ejkernel_implementations, Implementation),
    )


def _typed(hook: Callable[[], list[Iterable[Any]]], kind: type) -> list[Any]:
    declared = [item for items in hook() for item in items]
    for item in declared:
        if not isinstance(item, kind):
            raise TypeError(f"hook returned a {type(item).__name__}, wants {kind.__name__}")
    return declared


def _version_error(entry_point: importlib.metadata.EntryPoint) -> str | None:
    """Backends state the core they are made for as a requirement; a mismatch is a refusal, not a crash."""
    from packaging.requirements import Requirement

    required = (entry_point.dist.requires or []) if entry_point.dist else []
    for requirement in map(Requirement, required):
        if requirement.name == "ejkernel-core" and not requirement.specifier.contains(__version__, prereleases=True):
            return f"needs ejkernel-core {requirement.specifier}, this is {__version__}"
    return None


def _distribution(entry_point: importlib.metadata.EntryPoint) -> str:
    return f"{entry_point.dist.name} {entry_point.dist.version}" if entry_point.dist else "unknown"


def _entry_points() -> list[importlib.metadata.EntryPoint]:
    wanted = os.environ.get("EJKERNEL_PLUGINS")
    found = importlib.metadata.entry_points(group=GROUP)
    return [e for e in found if wanted is None or e.name in wanted.split(",")]
