"""Finds backends: two hooks, both of which return data, and a loader that a broken plugin cannot stop.

A backend is an entry point of the group `ejkernel`. Its module is imported here, its kernels are not: an implementation
names its functions as `"module:function"`, and they are imported when it is first chosen.
"""

import dataclasses
import importlib
import importlib.metadata
import inspect
import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import pluggy

from ejkernel._version import __version__
from ejkernel.ops.model import Implementation, Op
from ejkernel.suggestion import no_such_name_message

GROUP = "ejkernel"
hookspec = pluggy.HookspecMarker(GROUP)
hookimpl = pluggy.HookimplMarker(GROUP)


class Hooks:
    """The hooks that a backend may define. The module that defines them must import without its toolchain."""

    @hookspec
    def ejkernel_implementations(self) -> Iterable[Implementation]:  # type: ignore[empty-body]
        """Returns implementations of operations."""

    @hookspec
    def ejkernel_ops(self) -> Iterable[Op]:  # type: ignore[empty-body]
        """Returns operations in addition to those of the core."""


@dataclasses.dataclass(frozen=True)
class Plugin:
    """One discovered entry point.

    Attributes:
        name: Entry-point name.
        distribution: `"name version"` of the distribution it came from.
        error: Why it was not loaded, or which of its declarations were not accepted; None if all is well.
        notes: Sentences about its implementations that were renamed.
    """

    name: str
    distribution: str
    error: str | None = None
    notes: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Registry:
    """The operations and implementations of all plugins.

    Attributes:
        ops: Name -> operation.
        implementations: Operation name -> implementations, best first.
        plugins: All entry points, in the order in which they were loaded.
        versions: (operation, implementation name) -> version of the distribution it came from.
        plugin_by_implementation: (operation, implementation name) -> name of the plugin it came from.
        renaming_notes: (operation, new implementation name) -> a sentence, for each implementation whose name another
            distribution has already taken.
    """

    ops: dict[str, Op]
    implementations: dict[str, tuple[Implementation, ...]]
    plugins: tuple[Plugin, ...]
    versions: dict[tuple[str, str], str]
    plugin_by_implementation: dict[tuple[str, str], str]
    renaming_notes: dict[tuple[str, str], str] = dataclasses.field(default_factory=dict[tuple[str, str], str])

    @property
    def failed(self) -> tuple[Plugin, ...]:
        """Plugins with an error: not loaded, or with a declaration that was not accepted."""
        return tuple(plugin for plugin in self.plugins if plugin.error)

    def op(self, operation: Any) -> Op:
        """Returns the operation named by its id, its public function, its Kernel class or instance, or itself.

        Raises:
            ValueError: No such operation is registered.
        """
        operation = getattr(operation, "op", operation)
        for op in self.ops.values():
            if operation is op or operation is op.function or operation == op.name:
                return op
        if isinstance(operation, str):
            raise ValueError(f"op: {no_such_name_message('operation', operation, self.ops)}")
        raise ValueError(
            f"op: got {operation!r}, wants one of {', '.join(sorted(self.ops))}, its function or its class"
        )


loaded_registries: list[Registry] = []
"""The registry in use, as the only element; empty until something asks for it."""


def registry() -> Registry:
    """Discovers and loads the plugins, once per process. `EJKERNEL_PLUGINS=a,b` limits loading to those names; a name
    that is not installed counts as a plugin that did not load.
    """
    if not loaded_registries:
        loaded = load(_entry_points())
        loaded_registries.append(dataclasses.replace(loaded, plugins=(*loaded.plugins, *_missing_plugins())))
    return loaded_registries[0]


def reload() -> None:
    """Forgets the registry, so that the next call discovers the plugins again."""
    loaded_registries.clear()


def load(entry_points: Iterable[importlib.metadata.EntryPoint]) -> Registry:
    """Loads entry points one by one, this project's first and then by name; a failure does not stop the others."""
    built_in: tuple[Op, ...] = importlib.import_module(OPERATIONS).OPS
    collected = _CollectedDeclarations({op.name: op for op in built_in})
    owners: dict[str, str] = {}
    # Sorted, because the order of `importlib.metadata` depends on the file system, and the first of two equal names is
    # kept: the same packages must give the same registry on every machine.
    for entry_point in sorted(entry_points, key=lambda e: (not _is_built_in(e), e.name, _distribution_and_version(e))):
        name, owner = entry_point.name, _distribution_name(entry_point)
        if owners.setdefault(name, owner) != owner:
            name = f"{owner}:{name}"
        known = {plugin.name for plugin in collected.plugins}
        duplicate = f"another plugin is already named {name!r}" if name in known else None
        error = duplicate or collected.add(entry_point, name)
        collected.plugins.append(Plugin(name, _distribution_and_version(entry_point), error))
    return collected.registry()


@dataclasses.dataclass(frozen=True)
class _DeclaredImplementation:
    """An implementation with the plugin and the distribution that declared it."""

    implementation: Implementation
    plugin: str
    distribution_name: str
    version: str

    def with_qualified_name(self) -> "_DeclaredImplementation":
        """Returns it with a name that no other distribution can have."""
        name = f"{self.distribution_name}:{self.implementation.name}"
        return dataclasses.replace(self, implementation=dataclasses.replace(self.implementation, name=name))


class _CollectedDeclarations:
    """Collects the declarations of the plugins, and lists them by operation when all are loaded."""

    def __init__(self, ops: dict[str, Op]) -> None:
        self.ops = ops
        self.plugins: list[Plugin] = []
        self.declared: list[_DeclaredImplementation] = []

    def add(self, entry_point: importlib.metadata.EntryPoint, name: str) -> str | None:
        """Adds one plugin under a name; returns what is wrong with it, or None."""
        try:
            version_error = _version_error(entry_point)
            ops, implementations = ([], []) if version_error else _declarations_of_entry_point(entry_point)
        # A plugin may fail in any way, or be a script that exits, and must not take others along.
        except (Exception, SystemExit) as error:  # noqa: BLE001
            return f"{type(error).__name__}: {error}"
        if version_error:
            return version_error
        problems: list[str] = []
        for op in ops:
            problem = self._operation_error(op)
            if problem is None:
                self.ops[op.name] = op
            else:
                problems.append(problem)
        version = entry_point.dist.version if entry_point.dist else "unknown"
        self.declared += [
            _DeclaredImplementation(one, name, _distribution_name(entry_point), version) for one in implementations
        ]
        return "; ".join(problems) or None

    def _operation_error(self, op: Op) -> str | None:
        if op.name in self.ops:
            return f"operation {op.name!r} is already declared"
        if any(op.family.name == other.family.name and op.family is not other.family for other in self.ops.values()):
            return f"operation {op.name!r} has a family of its own that is named {op.family.name!r} as another's is"
        return None

    def registry(self) -> Registry:
        """Lists every implementation for the operations of its family.

        If two distributions use one name for implementations of an operation, the first to be loaded keeps it, and the
        other one is qualified by its distribution.
        """
        # Only when all plugins are loaded: one may declare an operation of a family that earlier plugins serve.
        by_op: dict[str, dict[str, _DeclaredImplementation]] = {name: {} for name in self.ops}
        problems: dict[str, list[str]] = {}
        renamed: dict[tuple[str, str], str] = {}
        for declared in self.declared:
            served = [op.name for op in self.ops.values() if declared.implementation.serves(op)]
            notes = problems.setdefault(declared.plugin, [])
            for name in served:
                entry = _add_implementation(by_op[name], declared)
                if isinstance(entry, str):
                    renamed[name, entry] = _renaming_note(declared, entry, by_op[name])
                elif not entry:
                    notes.append(f"implementation {declared.implementation.name!r} of {name} is already declared")
            notes += self._unknown_names(declared.implementation, served)
        entries = {(name, key): declared for name in by_op for key, declared in by_op[name].items()}
        return Registry(
            ops=self.ops,
            implementations={name: _in_static_order(declared.values()) for name, declared in by_op.items()},
            plugins=tuple(
                _plugin_with_errors(plugin, problems.get(plugin.name, []), entries, renamed) for plugin in self.plugins
            ),
            versions={key: declared.version for key, declared in entries.items()},
            plugin_by_implementation={key: declared.plugin for key, declared in entries.items()},
            renaming_notes=renamed,
        )

    def _unknown_names(self, implementation: Implementation, operation_names: list[str]) -> list[str]:
        """Returns the family and the operations that an implementation names and that do not exist."""
        if all(op.family.name != implementation.family for op in self.ops.values()):
            return [f"implementation {implementation.name!r}: no operation has the family {implementation.family!r}"]
        missing = ", ".join(sorted((implementation.only or frozenset()) - set(operation_names)))
        return [f"implementation {implementation.name!r}: {implementation.family} has no {missing}"] if missing else []


def _in_static_order(declared: Iterable[_DeclaredImplementation]) -> tuple[Implementation, ...]:
    """Returns the implementations in the order of choice, as far as it does not depend on the call."""
    return tuple(sorted((d.implementation for d in declared), key=_static_order_key))


def _static_order_key(implementation: Implementation) -> tuple[bool, int, str]:
    usual = implementation.constant_priority
    return usual is not None, -(usual or 0), implementation.name


def _add_implementation(entries: dict[str, _DeclaredImplementation], declared: _DeclaredImplementation) -> str | bool:
    """Adds an implementation to an operation; returns its new name if it was renamed, else whether it was added."""
    name = declared.implementation.name
    if name not in entries:
        entries[name] = declared
        return True
    qualified = declared.with_qualified_name()
    new_name = qualified.implementation.name
    if entries[name].distribution_name == declared.distribution_name or new_name in entries:
        return False
    entries[new_name] = qualified
    return new_name


def _renaming_note(declared: _DeclaredImplementation, name: str, entries: Mapping[str, _DeclaredImplementation]) -> str:
    short = declared.implementation.name
    return (
        f"implementation {short!r} of {declared.distribution_name} is named {name!r}, because "
        f"{entries[short].distribution_name} has an implementation {short!r}"
    )


def _plugin_with_errors(
    plugin: Plugin,
    declaration_errors: list[str],
    entries: Mapping[tuple[str, str], _DeclaredImplementation],
    renamed: Mapping[tuple[str, str], str],
) -> Plugin:
    """Returns a plugin with the errors of its implementations and the notes on their names."""
    error = "; ".join([*filter(None, [plugin.error]), *declaration_errors]) or None
    ops: dict[str, list[str]] = {}
    for key, sentence in renamed.items():
        if entries[key].plugin == plugin.name:
            ops.setdefault(sentence, []).append(key[0])
    notes = tuple(f"{sentence} of {', '.join(names)}" for sentence, names in ops.items())
    return dataclasses.replace(plugin, error=error, notes=notes)


def _declarations_of_entry_point(entry_point: importlib.metadata.EntryPoint) -> tuple[list[Op], list[Implementation]]:
    # A manager for each plugin: one that raises, or misspells a hook, cannot affect the calls of the others.
    manager = pluggy.PluginManager(GROUP)
    manager.add_hookspecs(Hooks)
    plugin = entry_point.load()
    _check_markers(manager, plugin)
    manager.register(plugin, name=entry_point.name)
    manager.check_pending()
    return (
        _checked_hook_results(manager.hook.ejkernel_ops, Op),
        _checked_hook_results(manager.hook.ejkernel_implementations, Implementation),
    )


def _check_markers(manager: pluggy.PluginManager, plugin: Any) -> None:
    """Raises TypeError for a hook of a plugin that has no `@hookimpl`: pluggy would not call it."""
    for name in (name for name in vars(Hooks) if name.startswith("ejkernel_")):
        hook = getattr(plugin, name, None)
        if hook is not None and manager.parse_hookimpl_opts(plugin, name) is None:
            got = "a function without it" if inspect.isroutine(hook) else f"a {type(hook).__name__}"
            raise TypeError(f"{name}: got {got}, wants a function with the decorator @ejkernel.ops.hookimpl")


def _checked_hook_results(hook: Callable[[], list[Iterable[Any]]], kind: type) -> list[Any]:
    declared = [item for items in hook() for item in items]
    for item in declared:
        if not isinstance(item, kind):
            raise TypeError(f"hook returned a {type(item).__name__}, wants {kind.__name__}")
    return declared


def _version_error(entry_point: importlib.metadata.EntryPoint) -> str | None:
    """Returns why a backend does not fit this core, from the requirement in its metadata; None if it fits.

    A mismatch is an error of the plugin that `ejkernel doctor` prints, and not an ImportError in the middle of a call.
    """
    from packaging.requirements import Requirement

    required = (entry_point.dist.requires or []) if entry_point.dist else []
    for requirement in map(Requirement, required):
        if requirement.name == "ejkernel-core" and not requirement.specifier.contains(__version__, prereleases=True):
            return f"needs ejkernel-core {requirement.specifier}, this is {__version__}"
    return None


OPERATIONS = "ejkernel.modules.operations"
"""The module with the library's own operations, which is above the engine and is loaded by name, as plugins are."""

BUILT_IN_DISTRIBUTIONS = frozenset(
    {"ejkernel-core", "ejkernel-xla", "ejkernel-triton", "ejkernel-pallas", "ejkernel-cuda"}
)
"""Distributions of this project. Their plugins are loaded first, so that none of their names goes to another plugin."""


def _is_built_in(entry_point: importlib.metadata.EntryPoint) -> bool:
    return entry_point.dist is not None and entry_point.dist.name.lower().replace("_", "-") in BUILT_IN_DISTRIBUTIONS


def _distribution_name(entry_point: importlib.metadata.EntryPoint) -> str:
    return entry_point.dist.name if entry_point.dist else "unknown"


def _distribution_and_version(entry_point: importlib.metadata.EntryPoint) -> str:
    return f"{entry_point.dist.name} {entry_point.dist.version}" if entry_point.dist else "unknown"


def _entry_points() -> list[importlib.metadata.EntryPoint]:
    names = _requested_names()
    entry_points = importlib.metadata.entry_points(group=GROUP)
    return [e for e in entry_points if names is None or e.name in names]


def _requested_names() -> list[str] | None:
    """Returns the names in `EJKERNEL_PLUGINS`; None if it is not set."""
    text = os.environ.get("EJKERNEL_PLUGINS")
    return None if text is None else [name.strip() for name in text.split(",") if name.strip()]


def _missing_plugins() -> list[Plugin]:
    installed = sorted({e.name for e in importlib.metadata.entry_points(group=GROUP)})
    missing = sorted(set(_requested_names() or ()) - set(installed))
    error = f"EJKERNEL_PLUGINS names it, and it is not installed; there are {', '.join(installed)}"
    return [Plugin(name, "unknown", error) for name in missing]
