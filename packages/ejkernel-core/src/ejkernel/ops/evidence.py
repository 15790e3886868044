"""Reads the evidence that backends ship: the suite's results on devices, `evidence/<chip>/<implementation>.json`.

A kernel takes part in dispatch on a GPU in the order of its priority only where a chip of the same kind has run all of
its tests, and all passed, with the toolchain that runs. Elsewhere it comes after all that are confirmed, XLA's among
them. Toolchains are the same where the minor versions are equal: JAX 0.11.2 and 0.11.4, Triton 3.6.0 and 3.6.1.

`python3 -m ejkernel_conformance.confirm` writes the files, and never a person: each holds a checksum of its content.
"""

import functools
import hashlib
import importlib.metadata
import importlib.resources
import os
import warnings
from collections.abc import Iterable, Iterator, Mapping
from importlib.resources.abc import Traversable
from typing import Literal

import msgspec

from ejkernel.ops.device import DeviceInfo
from ejkernel.ops.model import Implementation
from ejkernel.ops.toolchain import split_requirement

EVIDENCE_FORMAT_VERSION = 1
UNCONFIRMED_VARIABLE = "EJKERNEL_UNCONFIRMED"
"""With the value `allow` in the environment, dispatch goes by priority alone, evidence or not."""
TOOLCHAIN_MODULES = ("jax", "jax_triton", "triton")
"""The versions that tell toolchains apart, in the order in which they are printed."""


class EvidenceWarning(UserWarning):
    """An evidence file cannot be read; the implementation counts as not confirmed."""


class Tally(msgspec.Struct, frozen=True, omit_defaults=True):
    """The results of tests.

    Attributes:
        passed: Number of tests that passed.
        refused: Number of tests whose call the implementation refuses.
        failed: The failed tests, each with the first line of its error.
        not_run: Those that did not run.
        left_out: Those that did not run and are about calls that only a pinned `platform=` gets, because the priority
            of the implementation is below XLA's there. They say nothing about the calls that dispatch gives it.
    """

    passed: int = 0
    refused: int = 0
    failed: Mapping[str, str] = {}
    not_run: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()

    @property
    def count(self) -> int:
        """Returns how many tests there are."""
        return self.passed + self.refused + len(self.failed) + len(self.not_run)


class CarriedEvidence(msgspec.Struct, frozen=True):
    """Why evidence is valid for sources that no chip has run: they lower to the same programs as sources that a chip
    has run.

    Attributes:
        digest: Of the sources that the chip ran.
        programs: How many programs were compared; all were the same.
    """

    digest: str
    programs: int


class FamilyEvidence(msgspec.Struct, frozen=True, omit_defaults=True):
    """The evidence about one implementation of a family.

    Attributes:
        digest: The digest of the sources that ran (`source_digest`), or of other sources with the same programs.
        operations: The tests of each operation.
        claims: The tests of the implementation's declarations.
        stale: Whether the sources have changed since.
        carried: If the digest is not that of the sources that ran: which sources ran, and how many programs were
            compared.
    """

    digest: str
    operations: Mapping[str, Tally]
    claims: Tally = Tally()
    stale: bool = False
    carried: CarriedEvidence | None = None


class Confirmation(msgspec.Struct, frozen=True, omit_defaults=True):
    """The evidence of one device and one toolchain.

    Attributes:
        device: JAX's name for the kind of device.
        versions: The versions of everything that the kernels were compiled and run with.
        at: ISO 8601 time of the last run, UTC.
        families: The evidence about the implementation of each family.
    """

    device: str
    versions: Mapping[str, str]
    at: str
    families: Mapping[str, FamilyEvidence]

    @property
    def toolchain(self) -> str:
        """Returns the toolchain in words: `jax 0.11.2, triton 3.6.0`."""
        return _versions_in_words(self.versions, 3)


class EvidenceFile(msgspec.Struct, frozen=True, omit_defaults=True):
    """The content of an evidence file.

    Attributes:
        implementation: Name of the implementation.
        chip: The chip, as in the file's path.
        confirmations: One for each device and toolchain.
        kind: Whether a device ran the kernels, or a CPU interpreted them.
        checksum: The checksum of the rest of the file.
        format: The format of the file.
    """

    implementation: str
    chip: str
    confirmations: tuple[Confirmation, ...]
    kind: Literal["device", "interpreted"] = "device"
    checksum: str = ""
    format: int = EVIDENCE_FORMAT_VERSION


def chip_of(device: DeviceInfo) -> str:
    """Returns the name of a chip in paths: NVIDIA's by their compute capability, `sm_90`, others by their kind."""
    if device.platform == "tpu":
        return "tpu"
    if device.vendor == "nvidia" and device.compute_capability is not None:
        return f"sm_{round(device.compute_capability * 10)}"
    return (device.kind or device.platform).replace(" ", "_").replace("/", "_")


def encode(evidence_file: EvidenceFile) -> bytes:
    """Returns an evidence file as text that people can read and compare, with its checksum."""
    return msgspec.json.format(msgspec.json.encode(_with_checksum(evidence_file), order="sorted"), indent=1) + b"\n"


def decode(data: bytes) -> EvidenceFile:
    """Returns the content of an evidence file.

    Raises:
        ValueError: The data is not an evidence file, has another version, or was changed by hand.
    """
    file = msgspec.json.decode(data, type=EvidenceFile)
    if file.format != EVIDENCE_FORMAT_VERSION:
        raise ValueError(f"has format {file.format}, this version reads {EVIDENCE_FORMAT_VERSION}")
    if _with_checksum(file).checksum != file.checksum:
        raise ValueError("its checksum does not fit its content: evidence is written by runs, not by hand")
    return file


def _with_checksum(evidence_file: EvidenceFile) -> EvidenceFile:
    content = msgspec.json.encode(msgspec.structs.replace(evidence_file, checksum=""), order="sorted")
    return msgspec.structs.replace(evidence_file, checksum=hashlib.sha256(content).hexdigest()[:16])


@functools.cache
def shipped(folder: str, name: str) -> tuple[EvidenceFile, ...]:
    """Returns the evidence that a backend ships about the implementations of a name, on all chips.

    Args:
        folder: `"package:folder"` from the implementation.
        name: Name of the implementation.
    """
    return tuple(_read_evidence_files(folder, name))


def _read_evidence_files(folder: str, name: str) -> Iterator[EvidenceFile]:
    for file in evidence_files(folder):
        if file.name != f"{name}.json":
            continue
        try:
            yield decode(file.read_bytes())
        except (OSError, ValueError) as error:
            warnings.warn(f"the evidence in {file} is ignored: {error}", EvidenceWarning, stacklevel=3)


def evidence_files(folder: str) -> list[Traversable]:
    """Returns all evidence files that a backend ships, in order."""
    package, _, path = folder.partition(":")
    try:
        chips = [chip for chip in importlib.resources.files(package).joinpath(path).iterdir() if chip.is_dir()]
    except (ImportError, OSError):
        return []
    files = [file for chip in chips for file in chip.iterdir() if file.name.endswith(".json")]
    return sorted(files, key=str)


def unconfirmed(implementation: Implementation, op: str, device: DeviceInfo) -> str:
    """Returns why an implementation comes after all that are confirmed, in a sentence; empty where it does not."""
    if implementation.evidence is None or device.platform != "gpu" or _are_unconfirmed_kernels_allowed():
        return ""
    if not implementation.requires.devices & device.names:  # it is refused there
        return ""
    return _unconfirmed_reason(implementation, op, device)


@functools.cache
def _are_unconfirmed_kernels_allowed() -> bool:
    value = os.environ.get(UNCONFIRMED_VARIABLE, "")
    if value not in ("", "allow"):
        raise ValueError(f"{UNCONFIRMED_VARIABLE}: got {value!r}, wants 'allow', or nothing")
    return value == "allow"


@functools.cache
def _unconfirmed_reason(implementation: Implementation, op: str, device: DeviceInfo) -> str:
    return unconfirmed_reason_with_versions(
        implementation, op, device, installed_versions(implementation.requires.modules)
    )


def confirmed(implementation: Implementation, op: str, device: DeviceInfo) -> str:
    """Returns the device and toolchain where an implementation was confirmed; empty if evidence does not confirm it."""
    if implementation.evidence is None or device.platform != "gpu":
        return ""
    return _confirmed_text(implementation, op, device)


@functools.cache
def _confirmed_text(implementation: Implementation, op: str, device: DeviceInfo) -> str:
    versions = installed_versions(implementation.requires.modules)
    if unconfirmed_reason_with_versions(implementation, op, device, versions):
        return ""
    latest = _latest_confirmation(implementation, device, versions)
    return "" if latest is None else f"confirmed on {latest.device} with {latest.toolchain}"


def unconfirmed_reason_with_versions(
    implementation: Implementation, op: str, device: DeviceInfo, versions: Mapping[str, str]
) -> str:
    """Returns the same for a toolchain with the given versions of modules."""
    family, chip = implementation.family, chip_of(device)
    files = shipped(implementation.evidence or "", implementation.name)
    on_chip = [x for file in files if file.chip == chip for x in file.confirmations if family in x.families]
    if not on_chip:
        return f"not confirmed on {chip}: no run of its tests there is known"
    latest = _latest_confirmation(implementation, device, versions)
    if latest is None:
        needed = _needed_versions(implementation, versions)
        others = " and with ".join(dict.fromkeys(_versions_in_words(x.versions, 2, needed) for x in on_chip))
        return f"not confirmed with {_versions_in_words(needed, 2)} on {chip}, but with {others}"
    problem = not_confirmed_reason(latest.families[family], op)
    return f"not confirmed on {latest.device} with {latest.toolchain}: {problem}" if problem else ""


def _latest_confirmation(
    implementation: Implementation, device: DeviceInfo, versions: Mapping[str, str]
) -> Confirmation | None:
    """Returns the last run with a toolchain on a chip, and on the same kind of device where there is one; None without
    any.
    """
    chip, family, needed = chip_of(device), implementation.family, _needed_versions(implementation, versions)
    files = shipped(implementation.evidence or "", implementation.name)
    on_chip = [x for file in files if file.chip == chip for x in file.confirmations if family in x.families]
    matching = [x for x in on_chip if _minor_versions(x.versions, needed) == _minor_versions(needed, needed)]
    same_kind = [x for x in matching if x.device == device.kind]
    return max(same_kind or matching, key=lambda x: x.at, default=None)


def _needed_versions(implementation: Implementation, versions: Mapping[str, str]) -> dict[str, str]:
    """Returns the versions of what an implementation needs, and of JAX."""
    names = {"jax", *(split_requirement(module)[0] for module in implementation.requires.modules)}
    return {name: version for name, version in versions.items() if name in names}


def not_confirmed_reason(family_evidence: FamilyEvidence, op: str) -> str:
    """Returns what keeps evidence from confirming an operation; empty where it does."""
    tally = family_evidence.operations.get(op, Tally())
    if family_evidence.stale:
        return "the sources have changed since"
    if tally.failed:
        return f"{len(tally.failed)} of {tally.count} tests of {op} fail"
    if family_evidence.claims.failed:
        return f"{len(family_evidence.claims.failed)} of {family_evidence.claims.count} tests of its claims fail"
    missing = len(tally.not_run) + len(family_evidence.claims.not_run)
    if missing:
        return f"{missing} of {tally.count + family_evidence.claims.count} tests of {op} have not run"
    if tally.passed or (tally.refused and _all_tests_of_family_passed(family_evidence)):
        return ""
    return f"no test of {op} has run"


def _all_tests_of_family_passed(family_evidence: FamilyEvidence) -> bool:
    """Returns whether tests of the family's operations ran, and none failed or is left.

    Kernels get records of the family, whichever operation made them. So where an operation has no case that an
    implementation serves, the cases of its kin speak for the calls that it does serve.
    """
    tallies = family_evidence.operations.values()
    return any(tally.passed for tally in tallies) and not any(tally.failed or tally.not_run for tally in tallies)


class EvidenceSummary(msgspec.Struct, frozen=True):
    """The evidence of one run about one operation of an implementation.

    Attributes:
        chip: The chip.
        device: The kind of device, or what interpreted the kernels.
        toolchain: The toolchain in words.
        problem: Why the run does not confirm the operation; empty if it does.
        stale: Whether the only problem is that the sources have changed since the run.
    """

    chip: str
    device: str
    toolchain: str
    problem: str
    stale: bool

    def __str__(self) -> str:
        return f"{self.chip}, {self.toolchain}" + (f" ({self.problem})" if self.problem else "")


def evidence_summaries(implementation: Implementation, op: str) -> list[EvidenceSummary]:
    """Returns what is known of an operation of an implementation, of every chip and toolchain."""
    if implementation.evidence is None:
        return []
    return [
        EvidenceSummary(
            file.chip,
            one.device,
            one.toolchain,
            not_confirmed_reason(results, op),
            results.stale and not not_confirmed_reason(renewed, op),
        )
        for file in shipped(implementation.evidence, implementation.name)
        for one in file.confirmations
        if (results := one.families.get(implementation.family)) is not None and op in results.operations
        for renewed in [msgspec.structs.replace(results, stale=False)]
    ]


def evidence_in_words(implementation: Implementation, op: str) -> str:
    """Returns what is known of an operation of an implementation, in words."""
    if implementation.evidence is None:
        return "none needed"
    text = "; ".join(map(str, evidence_summaries(implementation, op)))
    if "tpu" not in implementation.requires.devices:
        return text or "none"
    interpreted = f"interpreted on a CPU ({text.replace('tpu, ', '')})" if text else "interpreted on a CPU in CI"
    return f"no TPU has run it: {interpreted}, and compiled for four chips in CI"


def installed_versions(modules: Iterable[str]) -> dict[str, str]:
    """Returns the installed versions of what an implementation needs, and of JAX, by module."""
    names = dict.fromkeys(["jax", *(split_requirement(needed)[0] for needed in modules)])
    versions = {name: _installed_version(name) for name in names}
    return {name: version for name, version in versions.items() if version}


@functools.cache
def _installed_version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except (importlib.metadata.PackageNotFoundError, ValueError):
        return None


def _minor_versions(versions: Mapping[str, str], names: Iterable[str]) -> dict[str, str]:
    """Returns the major and minor versions of some modules."""
    return {name: ".".join(versions.get(name, "").split(".")[:2]) for name in names}


def _versions_in_words(
    versions: Mapping[str, str], num_version_parts: int, names: Iterable[str] = TOOLCHAIN_MODULES
) -> str:
    """Returns versions in words, each cut to `num_version_parts` numbers."""
    shown = [name for name in TOOLCHAIN_MODULES if name in versions and name in names]
    return ", ".join(f"{name} {'.'.join(versions[name].split('.')[:num_version_parts])}" for name in shown)
