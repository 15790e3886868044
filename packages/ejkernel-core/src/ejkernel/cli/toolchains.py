"""Lists the GPU kernels that are confirmed with the installed toolchain, and with the toolchains that pip installs."""

import collections
import importlib.resources
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import msgspec

from ejkernel.ops import evidence
from ejkernel.ops.device import DeviceInfo
from ejkernel.ops.model import Implementation
from ejkernel.ops.plugins import Registry
from ejkernel.ops.toolchain import split_requirement


class ResolvedVersions(msgspec.Struct, frozen=True):
    """The versions that installers chose from the package index on a certain day, by version of Python."""

    date: str
    versions_by_python: Mapping[str, Mapping[str, str]] = msgspec.field(name="pythons")


class ConfirmedKernels(msgspec.Struct, frozen=True):
    """The state of the GPU kernels with one toolchain on one chip.

    Attributes:
        toolchain: `"installed"`, or a version of Python. JSON calls it `what`.
        chip: The chip.
        versions: The toolchain's versions, in words.
        confirmed: Implementation -> how many operations are confirmed.
        unconfirmed_by_reason: Why implementations come after those that are confirmed, or are refused -> their names
            and how many operations. JSON calls it `others`.
    """

    toolchain: str = msgspec.field(name="what")
    chip: str
    versions: str
    confirmed: dict[str, int]
    unconfirmed_by_reason: dict[str, dict[str, int]] = msgspec.field(name="others")


def resolved_versions() -> ResolvedVersions:
    """Returns what `pip install "ejkernel[gpu]"` installs, as `tests/project/gpu_versions.py` wrote it down."""
    file = importlib.resources.files("ejkernel.cli").joinpath("gpu_versions.json")
    return msgspec.json.decode(file.read_bytes(), type=ResolvedVersions)


def confirmed_kernels_by_toolchain(registered: Registry, devices: Iterable[DeviceInfo]) -> list[ConfirmedKernels]:
    """Returns how kernels stand with the toolchain that is installed, and with those that pip installs for each Python.

    Args:
        registered: What the plugins declared.
        devices: The devices that are here; without a GPU, the chips are those that some evidence is about.
    """
    kernels = list(_kernels_needing_evidence(registered))
    gpus = {evidence.chip_of(device): device for device in devices if device.platform == "gpu"}
    if not gpus:
        chips = {file.chip for one, _ in kernels for file in evidence.shipped(str(one.evidence), one.name)}
        gpus = {chip: _device_of_chip(chip) for chip in sorted(chips) or ["sm_90"]}
    modules = sorted({needed for one, _ in kernels for needed in one.requires.modules})
    toolchains = {"installed": evidence.installed_versions(modules)}
    toolchains |= {
        f"Python {python}": dict(versions) for python, versions in resolved_versions().versions_by_python.items()
    }
    return [
        _confirmed_kernels(toolchain, chip, device, versions, kernels)
        for chip, device in gpus.items()
        for toolchain, versions in toolchains.items()
    ]


def _device_of_chip(chip: str) -> DeviceInfo:
    """Returns a device of a chip; any kind of it."""
    capability = int(chip[3:]) / 10 if chip.startswith("sm_") else None
    return DeviceInfo(platform="gpu", vendor="nvidia" if capability else "", compute_capability=capability)


def _kernels_needing_evidence(registered: Registry) -> Iterator[tuple[Implementation, str]]:
    """Yields the implementations for GPUs that need evidence, with each operation that evidence or none is about."""
    for op, implementations in registered.implementations.items():
        for one in implementations:
            if one.evidence is not None and one.requires.devices & {"gpu", "nvidia", "amd"}:
                yield one, op


def _confirmed_kernels(
    toolchain: str,
    chip: str,
    device: DeviceInfo,
    versions: Mapping[str, str],
    kernels: Iterable[tuple[Implementation, str]],
) -> ConfirmedKernels:
    confirmed = collections.Counter[str]()
    unconfirmed_by_reason: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    for one, op in kernels:
        reason = _refusal_reason(one, versions) or evidence.unconfirmed_reason_with_versions(one, op, device, versions)
        if reason:
            unconfirmed_by_reason[_reason_without_counts(reason)][one.name] += 1
        else:
            confirmed[one.name] += 1
    words = ", ".join(f"{name} {versions[name]}" for name in evidence.TOOLCHAIN_MODULES if name in versions)
    return ConfirmedKernels(
        toolchain,
        chip,
        words,
        dict(confirmed),
        {reason: dict(names) for reason, names in unconfirmed_by_reason.items()},
    )


def _refusal_reason(one: Implementation, versions: Mapping[str, str]) -> str:
    """Returns why an implementation is refused with these versions; empty if it is not."""
    from packaging.specifiers import SpecifierSet

    for needed in one.requires.modules:
        module, accepted = split_requirement(needed)
        version = versions.get(module)
        if version is None and module in evidence.TOOLCHAIN_MODULES:
            return f"module {module} is not installed"
        if version is not None and not SpecifierSet(accepted).contains(version, prereleases=True):
            return f"{module} {version} is refused, needs {accepted}"
    return ""


def _reason_without_counts(reason: str) -> str:
    """Returns a reason that is the same for all operations that fail or lack tests: which and how many `ejkernel ops`
    says.
    """
    head, separator, problem = reason.partition(": ")
    for wording, short in (
        (" fail", "some of its tests fail"),
        ("have not run", "some of its tests have not run"),
        ("has run", "no test has run"),
    ):
        if separator and problem.endswith(wording):
            return f"{head}: {short}"
    return reason


def confirmed_kernels_to_dicts(rows: Iterable[ConfirmedKernels]) -> list[dict[str, Any]]:
    """Returns standings as plain data."""
    return [msgspec.to_builtins(one) for one in rows]


def confirmed_kernels_lines(rows: Iterable[ConfirmedKernels], date: str) -> Iterator[str]:
    """Yields standings as lines of text."""
    rows = list(rows)
    if not any(one.confirmed or one.unconfirmed_by_reason for one in rows):
        yield "Kernels for GPUs: none, as no installed backend but XLA has any"
        return
    yield f'Kernels for GPUs, by toolchain; versions that `pip install "ejkernel[gpu]"` installed on {date}'
    for one in rows:
        yield f"  {one.toolchain}, {one.chip}: {one.versions or 'no toolchain'}"
        confirmed = ", ".join(f"{name} ({count})" for name, count in sorted(one.confirmed.items()))
        yield f"    confirmed, with operations: {confirmed or 'none'}"
        for reason, names in sorted(one.unconfirmed_by_reason.items()):
            listed = ", ".join(f"{name} ({count})" for name, count in sorted(names.items()))
            yield f"    come after XLA, or are refused: {listed}: {reason}"
