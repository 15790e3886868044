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
from ejkernel.cli.as_json import JSON_OPTION, plugin_to_dict, print_json
from ejkernel.cli.devices import find_devices
from ejkernel.cli.tables import open_console, print_table, print_unmarked_text
from ejkernel.ops.config.persistent import PersistentCache
from ejkernel.ops.declarations import wrong_declarations
from ejkernel.ops.device import DeviceInfo, device_info
from ejkernel.ops.model import Implementation
from ejkernel.ops.plugins import Plugin, Registry, registry
from ejkernel.ops.toolchain import missing_module_reason, requirement_error, split_requirement


@click.command()
@click.option(
    "--strict",
    is_flag=True,
    help="Exit with status 1 if a plugin did not load or declares names that do not exist, or if there is no device.",
)
@JSON_OPTION
@click.pass_context
def doctor(ctx: click.Context, strict: bool, as_json: bool) -> None:
    """Show versions, devices, backends and problems.

    Also checks what each plugin declares: fields, dtypes, devices, modules and functions that do not exist.
    """
    registered = registry()
    declaration_errors = wrong_declarations(registered)
    devices, no_device = _count_devices()
    if as_json:
        print_json(_report_to_dict(registered, declaration_errors, devices, no_device))
    else:
        _print_report(open_console(), registered, declaration_errors, devices, no_device)
    if strict and (registered.failed or declaration_errors or no_device):
        ctx.exit(1)


DeclarationErrors = Mapping[str, list[str]]
"""Plugin name -> sentences about names in its implementations that do not exist."""


def _print_report(
    out: Console,
    registered_plugins: Registry,
    declaration_errors: DeclarationErrors,
    devices: collections.Counter[DeviceInfo],
    no_device_reason: str,
) -> None:
    print_table(out, "Versions", "what", "version", rows=_versions())
    _print_devices(out, devices, no_device_reason)
    _print_plugins(out, registered_plugins, declaration_errors)
    _print_operations(out, registered_plugins, set(devices))
    for line in toolchains.confirmed_kernels_lines(
        toolchains.confirmed_kernels_by_toolchain(registered_plugins, devices), toolchains.resolved_versions().date
    ):
        print_unmarked_text(out, line)
    print_unmarked_text(out, "")
    _print_store(out)


def _report_to_dict(
    registered_plugins: Registry,
    declaration_errors: DeclarationErrors,
    devices: collections.Counter[DeviceInfo],
    no_device_reason: str,
) -> dict[str, Any]:
    """Converts everything to plain data."""
    provided, store = _count_implementations(registered_plugins), PersistentCache()
    return {
        "versions": dict(_versions()),
        "devices": [{"count": count, **dataclasses.asdict(device)} for device, count in devices.items()],
        "trouble": no_device_reason or None,
        "plugins": [
            {
                **plugin_to_dict(one),
                "implementations": provided[one.name],
                "problems": declaration_errors.get(one.name, []),
            }
            for one in registered_plugins.plugins
        ],
        "operations": {
            op: [_implementation_to_dict(one, set(devices)) for one in registered_plugins.implementations[op]]
            for op in sorted(registered_plugins.ops)
        },
        "toolchains": toolchains.confirmed_kernels_to_dicts(
            toolchains.confirmed_kernels_by_toolchain(registered_plugins, devices)
        ),
        "store": {"path": str(store.path), "entries": len(store.entries()), "writable": _is_store_writable(store.path)},
    }


def _implementation_to_dict(implementation: Implementation, devices_here: set[DeviceInfo]) -> dict[str, Any]:
    requires = implementation.requires
    return {
        "name": implementation.name,
        "platform": implementation.platform,
        "priority": implementation.constant_priority,
        "gradient": implementation.backward is not None,
        "devices": sorted(requires.devices),
        "device_here": any(requires.devices & device.names for device in devices_here),
        "modules": list(requires.modules),
        "missing": [sentence for sentence in map(missing_module_reason, requires.modules) if sentence],
    }


def _versions() -> Iterator[tuple[str, str]]:
    yield "ejkernel", __version__
    yield "Python", f"{platform.python_version()} on {platform.platform()}"
    for name in ("jax", "jaxlib", "numpy"):
        yield name, importlib.metadata.version(name)


def _count_devices() -> tuple[collections.Counter[DeviceInfo], str]:
    """Counts the devices of each kind; the text says why JAX found none, if so."""
    try:
        return collections.Counter(map(device_info, find_devices())), ""
    except RuntimeError as error:
        return collections.Counter(), str(error).splitlines()[0]


def _print_devices(out: Console, devices: collections.Counter[DeviceInfo], no_device_reason: str) -> None:
    rows = [(count, device, device.platform, device.vendor or "-") for device, count in devices.items()]
    print_table(out, "Devices", "count", "kind", "platform", "vendor", rows=rows, right_aligned_columns=["count"])
    if no_device_reason:
        print_unmarked_text(out, f"JAX found no device: {no_device_reason}\n", "red")


def _count_implementations(registered: Registry) -> collections.Counter[str]:
    """Counts the implementations of each plugin; one that serves several operations counts once."""
    declared = {
        (registered.plugin_by_implementation[op, one.name], one.family, one.name.rpartition(":")[2], one.only)
        for op, implementations in registered.implementations.items()
        for one in implementations
    }
    return collections.Counter(plugin for plugin, *_ in declared)


def _print_plugins(out: Console, registered: Registry, declaration_errors: DeclarationErrors) -> None:
    provided = _count_implementations(registered)
    rows = [
        (p.name, p.distribution, provided[p.name], _plugin_status(p, declaration_errors)) for p in registered.plugins
    ]
    headings = ("plugin", "distribution", "implementations", "status")
    print_table(
        out, "Backends", *headings, rows=rows, right_aligned_columns=["implementations"], folded_columns=["status"]
    )
    if not rows:
        print_unmarked_text(out, "No backend is installed. ejkernel-xla runs every operation on every device.\n", "red")
    for plugin in registered.plugins:
        for sentence in declaration_errors.get(plugin.name, ()):
            print_unmarked_text(out, f"Problem in plugin {plugin.name}: {sentence}", "red")
        for note in plugin.notes:
            print_unmarked_text(out, f"Note on plugin {plugin.name}: {note}")
    if declaration_errors or any(plugin.notes for plugin in registered.plugins):
        out.print()


def _plugin_status(plugin: Plugin, declaration_errors: DeclarationErrors) -> tuple[str, str]:
    if plugin.error:
        return plugin.error, "red"
    return ("loaded, with problems", "red") if plugin.name in declaration_errors else ("loaded", "green")


def _print_operations(out: Console, registered: Registry, devices_here: set[DeviceInfo]) -> None:
    rows: list[tuple[object, ...]] = []
    for op in sorted(registered.ops):
        implementations = registered.implementations[op]
        rows += [("" if n else op, *_implementation_row(one, devices_here)) for n, one in enumerate(implementations)]
        if not implementations:
            rows.append((op, ("none installed", "red"), *[""] * 5))
    headings = ("operation", "implementation", "platform", "priority", "gradient", "devices", "toolchain")
    print_table(
        out,
        "Operations",
        *headings,
        rows=rows,
        right_aligned_columns=["priority"],
        folded_columns=["devices", "toolchain"],
    )


def _implementation_row(implementation: Implementation, devices_here: set[DeviceInfo]) -> tuple[object, ...]:
    requires = implementation.requires
    serves = any(requires.devices & device.names for device in devices_here)
    missing = any(map(missing_module_reason, requires.modules))
    toolchain = ", ".join(map(_module_status, requires.modules)) or "none needed"
    return (
        implementation.name,
        implementation.platform,
        "by call" if implementation.constant_priority is None else implementation.constant_priority,
        "yes" if implementation.backward else "no",
        (f"{', '.join(sorted(requires.devices))}{'' if serves else ' (not here)'}", "green" if serves else "red"),
        (toolchain, "red" if missing else "green"),
    )


def _module_status(requirement: str) -> str:
    """Names a module, and says if it is missing or has another version."""
    if requirement_error(requirement) is not None:
        return f"{requirement} (invalid requirement)"
    name, versions = split_requirement(requirement)
    sentence = missing_module_reason(requirement)
    if sentence is None:
        return name
    return f"{name} (missing)" if sentence.startswith(f"module {name} is not") else f"{name} (needs {versions})"


def _print_store(out: Console) -> None:
    store = PersistentCache()
    count = len(store.entries())
    state = (
        "writable"
        if _is_store_writable(store.path)
        else "read-only: tuned configurations last only as long as the process"
    )
    print_unmarked_text(out, f"Store {store.path}: {count} {'entry' if count == 1 else 'entries'}, {state}")


def _is_store_writable(path: Path) -> bool:
    """Says whether the store could be written, from its nearest existing parent and its permissions."""
    directory = next(parent for parent in path.absolute().parents if parent.exists())
    if not directory.is_dir() or (path.exists() and not path.is_file()):
        return False
    return os.access(directory, os.W_OK) and (not path.exists() or os.access(path, os.W_OK))
