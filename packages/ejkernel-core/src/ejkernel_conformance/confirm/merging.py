"""From results of runs to evidence files."""

import collections
import importlib.util
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Literal

import msgspec

from ejkernel.ops import evidence
from ejkernel.ops.device import DeviceInfo
from ejkernel.ops.evidence import Confirmation, EvidenceFile, FamilyEvidence, Tally
from ejkernel.ops.model import Implementation
from ejkernel_conformance.confirm.listing import SuiteTest
from ejkernel_conformance.confirm.state import COMPILED_WITH, Result, Run, known_results
from ejkernel_conformance.confirm.toolchain import digests, implementations

Key = tuple[str, str]
"""The chip and the name of an implementation."""
TPU = "tpu"
"""The chip of kernels for TPUs, which a CPU interprets as long as none is at hand."""


def merge(runs: Iterable[Run]) -> list[Path]:
    """Writes what runs found to the evidence files of the backends, and marks what is stale; returns files written."""
    known = {key: one for key, one in implementations().items() if one.evidence is not None}
    current = digests(known)
    found: dict[Key, list[Confirmation]] = collections.defaultdict(list)
    for run in _by_toolchain(runs):
        device = DeviceInfo(**run.about["device"])
        served = {key: one for key, one in known.items() if device.platform != "cpu" or one.backend == "tpu"}
        for name, confirmation in _confirmations(run, served, current):
            found[_chip(device), name].append(confirmation)
    written: list[Path] = []
    for path, old in _existing(known, found):
        added = found.get((old.chip, old.implementation), [])
        new = with_marks(_with_confirmations(old, added), current)
        if new != old and new.confirmations:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(evidence.encode(new))
            written.append(path)
    return written


def _chip(device: DeviceInfo) -> str:
    """Returns the chip that a run is about: what a CPU interprets are kernels for TPUs."""
    return TPU if device.platform == "cpu" else evidence.chip_of(device)


def _by_toolchain(runs: Iterable[Run]) -> Iterator[Run]:
    """Runs of the same toolchain and device as one: the last has the tests and the sources, the last result counts."""
    groups: dict[str, list[Run]] = collections.defaultdict(list)
    for run in runs:
        groups[run.toolchain].append(run)
    for group in groups.values():
        newest = {key: value for run in group for key, value in run.about["digests"].items()}
        tests = {test.id: test for run in group for test in run.tests}
        union = Run({**group[-1].about, "digests": newest}, list(tests.values()))
        union.results = known_results(union, group)
        yield union


def _confirmations(
    run: Run, known: Mapping[tuple[str, str], Implementation], current: Mapping[str, str]
) -> Iterator[tuple[str, Confirmation]]:
    """Yields what a run says about each implementation, of the families whose sources are still the same."""
    tests: dict[str, dict[str, list[SuiteTest]]] = collections.defaultdict(lambda: collections.defaultdict(list))
    for test in run.tests:
        key = (test.family, test.implementation)
        if key in known and run.digest(test) == current["/".join(key)]:
            tests[test.implementation][test.family].append(test)
    versions = {name: run.about["versions"][name] for name in sorted(run.about["versions"])}
    for name, families in tests.items():
        yield (
            name,
            Confirmation(
                device=run.about["device"]["kind"],
                versions=versions,
                at=run.about["at"],
                families={
                    family: _family(listed, run.results, current[f"{family}/{name}"])
                    for family, listed in sorted(families.items())
                    if any(test.id in run.results for test in listed)
                },
            ),
        )


def _family(tests: list[SuiteTest], results: Mapping[str, Result], digest: str) -> FamilyEvidence:
    by_op: dict[str, list[SuiteTest]] = collections.defaultdict(list)
    for test in tests:
        by_op[test.op].append(test)
    tallies = {op: _tally(listed, results) for op, listed in sorted(by_op.items())}
    return FamilyEvidence(digest=digest, claims=tallies.pop("", Tally()), operations=tallies)


def _tally(tests: Iterable[SuiteTest], results: Mapping[str, Result]) -> Tally:
    outcomes = {test.id: results.get(test.id) for test in tests}
    counts = collections.Counter("not run" if x is None else x.outcome for x in outcomes.values())
    failed = {test: x.message for test, x in outcomes.items() if x is not None and x.outcome == "failed"}
    return Tally(
        passed=counts["passed"],
        refused=counts["refused"],
        failed={test: message.partition("\n")[0][:300] for test, message in failed.items()},
        not_run=tuple(test for test, x in outcomes.items() if x is None),
    )


def _existing(
    known: Mapping[tuple[str, str], Implementation], found: Iterable[Key]
) -> Iterator[tuple[Path, EvidenceFile]]:
    """Yields the evidence files that there are, and empty ones for what was found about others."""
    folders = {one.name: str(one.evidence) for one in known.values()}
    paths: dict[Path, EvidenceFile] = {}
    for name, folder in sorted(folders.items()):
        for file in evidence.shipped(folder, name):
            paths[evidence_path(folder, file.chip, name)] = file
        for chip in (chip for chip, other in found if other == name):
            path = evidence_path(folder, chip, name)
            kind: Literal["interpreted", "device"] = "interpreted" if chip == TPU else "device"
            paths.setdefault(path, EvidenceFile(implementation=name, chip=chip, confirmations=(), kind=kind))
    yield from paths.items()


def evidence_path(folder: str, chip: str, name: str) -> Path:
    package, _, below = folder.partition(":")
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise ValueError(f"evidence: there is no package {package!r} to write it to")
    return Path(spec.submodule_search_locations[0]) / below / chip / f"{name}.json"


def _with_confirmations(file: EvidenceFile, added: Iterable[Confirmation]) -> EvidenceFile:
    """Returns the file with what was found; that of the same device, toolchain and sources is replaced by operation."""
    by_toolchain = {_identity(one): one for one in file.confirmations}
    for one in added:
        old = by_toolchain.get(_identity(one))
        families = dict(old.families) if old else {}
        families |= {family: _with_family(families.get(family), found) for family, found in one.families.items()}
        if families:
            by_toolchain[_identity(one)] = msgspec.structs.replace(one, families=dict(sorted(families.items())))
    ordered = tuple(by_toolchain[key] for key in sorted(by_toolchain))
    return msgspec.structs.replace(file, confirmations=ordered)


def _with_family(old: FamilyEvidence | None, new: FamilyEvidence) -> FamilyEvidence:
    if old is None or old.digest != new.digest:
        return new
    claims = new.claims if new.claims.count else old.claims
    return msgspec.structs.replace(new, operations={**old.operations, **new.operations}, claims=claims)


def _identity(one: Confirmation) -> tuple[str, ...]:
    return (one.device, *(one.versions.get(name, "") for name in COMPILED_WITH))


def with_marks(file: EvidenceFile, current: Mapping[str, str]) -> EvidenceFile:
    """Returns the file in which a family is stale where its sources are others now; those that are gone
    are left out.
    """
    name = file.implementation
    confirmations = tuple(
        msgspec.structs.replace(
            one,
            families={
                family: msgspec.structs.replace(found, stale=found.digest != current[f"{family}/{name}"])
                for family, found in one.families.items()
                if f"{family}/{name}" in current
            },
        )
        for one in file.confirmations
    )
    return msgspec.structs.replace(file, confirmations=tuple(one for one in confirmations if one.families))
