"""Finds the devices that `--target` names: known kinds, and those that installed distributions predict for."""

import importlib.metadata

import click

from ejkernel.ops.device import DEVICES_BY_SHORT_NAME, DeviceInfo, find_device
from ejkernel.ops.execution.target import TARGET_ENTRY_POINT_GROUP, Target
from ejkernel.suggestion import did_you_mean


def find_target(name: str) -> Target:
    """Looks up a device that an installed distribution can predict times for.

    Raises:
        click.UsageError: No entry point offers it. The message says which targets exist and which do not load.
    """
    targets, problems = _load_targets()
    if name in targets:
        return targets[name]
    known = f"there are {', '.join(targets)}" if targets else "no installed package offers any; ejkernel-pallas does"
    raise click.UsageError("; ".join([f"--target: got {name!r}, {known}", *problems]))


def find_device_to_explain(name: str) -> DeviceInfo:
    """Looks up a device that a call can be explained for.

    Args:
        name: A known short name, a device kind, or a target that an installed distribution offers.

    Raises:
        click.UsageError: There is no such device. The message lists the known ones.
    """
    targets, problems = _load_targets()
    if name in targets:
        return targets[name].device
    try:
        return find_device(name)
    except ValueError:
        known = [*DEVICES_BY_SHORT_NAME, *(target for target in targets if target not in DEVICES_BY_SHORT_NAME)]
        message = f"--target: got {name!r}, there are {', '.join(known)}{did_you_mean(name, known)}"
        raise click.UsageError("; ".join([message, *problems])) from None


def _load_targets() -> tuple[dict[str, Target], list[str]]:
    """Loads the targets of installed distributions; a sentence for each distribution that fails."""
    targets: dict[str, Target] = {}
    problems: list[str] = []
    for entry_point in sorted(
        importlib.metadata.entry_points(group=TARGET_ENTRY_POINT_GROUP), key=lambda e: (e.name, e.value)
    ):
        try:
            targets = {**entry_point.load()(), **targets}
        except Exception as error:  # noqa: BLE001 - a plugin may fail in any way, and must not take others along
            source = entry_point.dist.name if entry_point.dist else entry_point.value
            problems.append(f"the targets of {source} do not load: {type(error).__name__}: {error}")
    return targets, problems
