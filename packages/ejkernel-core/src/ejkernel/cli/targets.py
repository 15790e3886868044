"""The devices that `ejkernel tune --target` can name: those of installed distributions, which are asked only then."""

import importlib.metadata

import click

from ejkernel.ops.execution.target import GROUP, Target


def find_target(name: str) -> Target:
    """Looks a target up.

    Raises:
        click.UsageError: No entry point offers it; says which offers what, and which do not load.
    """
    found: dict[str, Target] = {}
    problems: list[str] = []
    for entry_point in sorted(importlib.metadata.entry_points(group=GROUP), key=lambda e: (e.name, e.value)):
        try:
            found = {**entry_point.load()(), **found}
        except Exception as error:  # noqa: BLE001 - a plugin may fail in any way, and must not take others along
            source = entry_point.dist.name if entry_point.dist else entry_point.value
            problems.append(f"the targets of {source} do not load: {type(error).__name__}: {error}")
    if name in found:
        return found[name]
    offered = f"there are {', '.join(found)}" if found else "no installed package offers any; ejkernel-pallas does"
    raise click.UsageError("; ".join([f"--target: got {name!r}, {offered}", *problems]))
