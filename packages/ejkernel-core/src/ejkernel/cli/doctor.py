"""Implements `ejkernel doctor`."""

import collections
import dataclasses
import importlib.metadata
import os
import platform
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from ejkernel._version import __version__
from ejkernel.cli import toolchains
from ejkernel.cli.as_json import AS_JSON, plain_plugin, print_json
from ejkernel.cli.devices import find_devices
from ejkernel.cli.tables import console, print_plain, print_table
from ejkernel.ops.config.persistent import PersistentCache
from ejkernel.ops.declarations import wrong_declarations
from ejkernel.ops.device import DeviceInfo, device_info
from ejkernel.ops.model import Implementation
from ejkernel.ops.plugins import Plugin, Registry, registry
from ejkernel.ops.toolchain import lacking, split_requirement


@click.command()
@click.option(
    "--strict",
    is_flag=True,
    help="Exit with status 1 if a plugin did not load or declares names that do not exist, or if there is no device.",
)
@AS_JSON
@click.pass_context
def doctor(ctx: click.Context, strict: bool, as_json: bool) -> None:
    """Show versions, devices, backends and problems.

    Also checks what each plugin declares: fields, dtypes, devices, modules and functions that do not exist.
    """
    registered = registry()
    wrong = wrong_declarations(registered)
    devices, no_device = _devices()
    if as_json:
        print_json(_plain(registered, wrong, devices, no_device))
    else:
        _print(console(), registered, wrong, devices, no_device)
    if strict and (registered.failed or wrong or no_device):
        ctx.exit(1)


Wrong = Mapping[str, list[str]]
"""Plugin name -> sentences about names in its implementations that do not exist."""


def _print(
    out: Console, registered: Registry, wrong: Wrong, devices: collections.Counter[DeviceInfo], no_device: str
) -> None:
    print_table(out, "Versions", "what", "version", rows=_versions())
    _print_devices(out, devices, no_device)
    _print_plugins(out, registered, wrong)
    _print_operations(out, registered, set(devices))
    for line in toolchains.lines(toolchains.standings(registered, devices), toolchains.resolved().date):
        print_plain(out, line)
    print_plain(out, "")
    _print_store(out)


def _plain(
    registered: Registry, wrong: Wrong, devices: collections.Counter[DeviceInfo], no_device: str
) -> dict[str, Any]:
    """Converts everything to plain data."""
    provided, store = _provided(registered), PersistentCache()
    return {
        "versions": dict(_versions()),
        "devices": [{"count": count, **dataclasses.asdict(device)} for device, count in devices.items()],
        "trouble": no_device or None,
        "plugins": [
            {**plain_plugin(one), "implementations": provided[one.name], "problems": wrong.get(one.name, [])}
            for one in registered.plugins
        ],
        "operations": {
            op: [_plain_implementation(one, set(devices)) for one in registered.implementations[op]]
            for op in sorted(registered.ops)
        },
        "toolchains": toolchains.plain(toolchains.standings(registered, devices)),
        "store": {"path": str(store.path), "entries": len(store.entries()), "writable": _writable(store.path)},
    }


def _plain_implementation(implementation: Implementation, devices_here: set[DeviceInfo]) -> dict[str, Any]:
    requires = implementation.requires
    return {
        "name": implementation.name,
        "platform": implementation.platform,
        "priority": implementation.usual_rank,
        "gradient": implementation.backward is not None,
        "devices": sorted(requires.devices),
        "device_here": any(requires.devices & device.names for device in devices_here),
        "modules": list(requires.modules),
        "missing": [sentence for sentence in map(lacking, requires.modules) if sentence],
    }


def _versions() -> Iterator[tuple[str, str]]:
    yield "ejkernel", __version__
    yield "Python", f"{platform.python_version()} on {platform.platform()}"
    for name in ("jax", "jaxlib", "numpy"):
        yield name, importlib.metadata.version(name)


def _devices() -> tuple[collections.Counter[DeviceInfo], str]:
    """Counts the devices of each kind; the text says why JAX found none, if so."""
    try:
        return collections.Counter(map(device_info, find_devices())), ""
    except RuntimeError as error:
        return collections.Counter(), str(error).splitlines()[0]


def _print_devices(out: Console, devices: collections.Counter[DeviceInfo], no_device: str) -> None:
    rows = [(count, device, device.platform, device.vendor or "-") for device, count in devices.items()]
    print_table(out, "Devices", "count", "kind", "platform", "vendor", rows=rows, right=["count"])
    if no_device:
        print_plain(out, f"JAX found no device: {no_device}\n", "red")


def _provided(registered: Registry) -> collections.Counter[str]:
    """Counts the implementations of each plugin; one that serves several operations counts once."""
    declared = {
        (registered.providers[op, one.name], one.family, one.name.rpartition(":")[2], one.only)
        for op, implementations in registered.implementations.items()
        for one in implementations
    }
    return collections.Counter(plugin for plugin, *_ in declared)


def _print_plugins(out: Console, registered: Registry, wrong: Wrong) -> None:
    provided = _provided(registered)
    rows = [(p.name, p.distribution, provided[p.name], _status(p, wrong)) for p in registered.plugins]
    headings = ("plugin", "distribution", "implementations", "status")
    print_table(out, "Backends", *headings, rows=rows, right=["implementations"], fold=["status"])
    if not rows:
        print_plain(out, "No backend is installed. ejkernel-xla runs every operation on every device.\n", "red")
    for plugin in registered.plugins:
        for sentence in wrong.get(plugin.name, ()):
            print_plain(out, f"Problem in plugin {plugin.name}: {sentence}", "red")
        for note in plugin.notes:
            print_plain(out, f"Note on plugin {plugin.name}: {note}")
    if wrong or any(plugin.notes for plugin in registered.plugins):
        out.print()


def _status(plugin: Plugin, wrong: Wrong) -> tuple[str, str]:
    if plugin.error:
        return plugin.error, "red"
    return ("loaded, with problems", "red") if plugin.name in wrong else ("loaded", "green")


def _print_operations(out: Console, registered: Registry, devices_here: set[DeviceInfo]) -> None:
    rows: list[tuple[object, ...]] = []
    for op in sorted(registered.ops):
        implementations = registered.implementations[op]
        rows += [("" if n else op, *_implementation(one, devices_here)) for n, one in enumerate(implementations)]
        if not implementations:
            rows.append((op, ("none installed", "red"), *[""] * 5))
    headings = ("operation", "implementation", "platform", "priority", "gradient", "devices", "toolchain")
    print_table(out, "Operations", *headings, rows=rows, right=["priority"], fold=["devices", "toolchain"])


def _implementation(implementation: Implementation, devices_here: set[DeviceInfo]) -> tuple[object, ...]:
    requires = implementation.requires
    serves = any(requires.devices & device.names for device in devices_here)
    missing = any(map(lacking, requires.modules))
    toolchain = ", ".join(map(_toolchain, requires.modules)) or "none needed"
    return (
        implementation.name,
        implementation.platform,
        "by call" if implementation.usual_rank is None else implementation.usual_rank,
        "yes" if implementation.backward else "no",
        (f"{', '.join(sorted(requires.devices))}{'' if serves else ' (not here)'}", "green" if serves else "red"),
        (toolchain, "red" if missing else "green"),
    )


def _toolchain(needed: str) -> str:
    """Names a module, and says if it is missing or has another version."""
    name, versions = split_requirement(needed)
    sentence = lacking(needed)
    if sentence is None:
        return name
    return f"{name} (missing)" if sentence.startswith(f"module {name} is not") else f"{name} (needs {versions})"


def _print_store(out: Console) -> None:
    store = PersistentCache()
    count = len(store.entries())
    state = "writable" if _writable(store.path) else "read-only: tuned configurations last only as long as the process"
    print_plain(out, f"Store {store.path}: {count} {'entry' if count == 1 else 'entries'}, {state}")


def _writable(path: Path) -> bool:
    """Says whether the store could be written, from the permissions of its nearest existing directory."""
    directory = next(parent for parent in path.absolute().parents if parent.is_dir())
    return os.access(directory, os.W_OK) and (not path.exists() or os.access(path, os.W_OK))
