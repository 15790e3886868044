"""Evidence for sources that lower to the programs that a chip has confirmed."""

import dataclasses
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from ejkernel.ops import evidence
from ejkernel.ops.device import find_device, target_device
from ejkernel.ops.evidence import CarriedEvidence, Confirmation, EvidenceFile, FamilyEvidence, Tally
from ejkernel.ops.model import Implementation
from ejkernel.ops.plugins import registry
from ejkernel_conformance.confirm import listing, merging, programs
from ejkernel_conformance.confirm.toolchain import digests, implementations
from ejkernel_conformance.served import refusal_of
from ejkernel_conformance.subjects import abstract_record

NEW = "is new"
SHOWN = 12
"""How many calls a refusal names."""


@dataclasses.dataclass(frozen=True)
class Carrying:
    """The result of carrying evidence over.

    Attributes:
        lines: A sentence about each implementation whose sources have changed.
        written: The files that were written or removed.
        refused: How many implementations could not be carried.
    """

    lines: tuple[str, ...]
    written: tuple[Path, ...]
    refused: int


def read(path: Path) -> dict[str, Any]:
    """Returns the content of a file that `programs` wrote.

    Raises:
        ValueError: The file is not such a file, or has another version.
    """
    content = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(content, dict) or content.get("format") != programs.FORMAT:
        raise ValueError(f"{path}: is no file of `programs`, or of another version; this one reads {programs.FORMAT}")
    return content


def parse_renamed(pairs: Iterable[str]) -> dict[str, str]:
    """Parses `old=new` to old names and new names.

    Raises:
        ValueError: A text is no such pair.
    """
    names: dict[str, str] = {}
    for pair in pairs:
        old, equals, new = pair.partition("=")
        if not (old and equals and new):
            raise ValueError(f"--renamed: got {pair!r}, wants OLD=NEW")
        names[old] = new
    return names


def carry(
    before: Mapping[str, Any], after: Mapping[str, Any], renamed: Mapping[str, str], partial: bool = False
) -> Carrying:
    """Renews the digests of evidence whose implementations lower to the same programs, and marks what is stale.

    Args:
        before: Programs of the sources that a chip has confirmed.
        after: Programs of the sources as they are.
        renamed: Old name -> new name, of families, implementations, `family/implementation` and FFI handlers.
        partial: Where some programs of an implementation are the same, its evidence is carried too, and the tests of
            the calls whose programs differ count as not run.

    Raises:
        ValueError: The two files are not of the same chip and toolchain.
    """
    for what in ("chip", "toolchain"):
        if before[what] != after[what]:
            raise ValueError(f"the two files are not of the same {what}: {before[what]} and {after[what]}")
    known = {key: one for key, one in implementations().items() if one.evidence is not None}
    judge = _Judge(before, after, renamed, digests(known), partial)
    old = dict(_files(known))
    new = _carried(old, known, judge)
    written: list[Path] = []
    for path in sorted(old.keys() | new.keys()):
        content = merging.with_marks(new[path], judge.current) if path in new else None
        if content is None or not content.confirmations:
            path.unlink(missing_ok=True)
        elif path in old and evidence.encode(content) == evidence.encode(old[path]):
            continue
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(evidence.encode(content))
        written.append(path)
    return Carrying(tuple(judge.lines.values()), tuple(written), judge.refused)


def _files(known: Mapping[tuple[str, str], Implementation]) -> Iterator[tuple[Path, EvidenceFile]]:
    """Yields all evidence files of the backends, those of implementations that have another name now among them."""
    for folder in sorted({str(one.evidence) for one in known.values()}):
        for file in evidence.evidence_files(folder):
            yield Path(str(file)), evidence.decode(file.read_bytes())


def _carried(
    old: Mapping[Path, EvidenceFile], known: Mapping[tuple[str, str], Implementation], judge: "_Judge"
) -> dict[Path, EvidenceFile]:
    """Returns the files with every family at the name that it has now."""
    new: dict[Path, EvidenceFile] = {}
    folders = {name: str(one.evidence) for (_, name), one in known.items()}
    for path, file in old.items():
        for one in file.confirmations:
            for family, found in one.families.items():
                key = judge.new_key(f"{family}/{file.implementation}")
                if key not in judge.current or judge.replaced(f"{family}/{file.implementation}"):
                    continue
                family_now, _, name = key.partition("/")
                same = name == file.implementation
                to = path if same else merging.evidence_path(folders[name], file.chip, name)
                empty = EvidenceFile(implementation=name, chip=file.chip, confirmations=(), kind=file.kind)
                moved = msgspec.structs.replace(one, families={family_now: judge.judged(file, family, found, same)})
                new[to] = _with(new.get(to, empty), moved)
    return new


def _with(file: EvidenceFile, one: Confirmation) -> EvidenceFile:
    """Returns the file with a further family of a confirmation."""
    confirmations = list(file.confirmations)
    for n, other in enumerate(confirmations):
        if (other.device, other.versions) == (one.device, one.versions):
            families = dict(sorted({**other.families, **one.families}.items()))
            confirmations[n] = msgspec.structs.replace(other, families=families)
            return msgspec.structs.replace(file, confirmations=tuple(confirmations))
    return msgspec.structs.replace(file, confirmations=(*confirmations, one))


class _Judge:
    """Whether evidence is about the sources as they are, by what these lower to."""

    def __init__(
        self,
        before: Mapping[str, Any],
        after: Mapping[str, Any],
        renamed: Mapping[str, str],
        current: Mapping[str, str],
        partial: bool,
    ) -> None:
        self.before, self.after, self.renamed, self.current = before, after, renamed, current
        self.partial = partial
        self.lines: dict[str, str] = {}
        self.refused = 0

    def new_key(self, key: str) -> str:
        """Returns what a `family/implementation` is called now."""
        if key in self.renamed:
            return self.renamed[key]
        family, _, name = key.partition("/")
        return f"{self.renamed.get(family, family)}/{self.renamed.get(name, name)}"

    def replaced(self, key: str) -> bool:
        """Returns whether another implementation, whose evidence counts, has the name now: two have become one."""
        others = (each for each in self.before["programs"] if each != key)
        found = next((each for each in others if self.new_key(each) == key), "")
        if found:
            self.lines[key] = f"{key}: replaced by the evidence of {found}"
        return bool(found)

    def judged(self, file: EvidenceFile, family: str, found: FamilyEvidence, same_name: bool) -> FamilyEvidence:
        """Returns the evidence with the digest of the present sources, if they lower to the same programs."""
        key = f"{family}/{file.implementation}"
        new, began = self.new_key(key), found.carried.digest if found.carried else found.digest
        if found.digest == self.current[new] and same_name:
            return found
        differences = self._differences(key, new)
        problems = list(self._problems(key, new, {found.digest, began}))
        count = len(self.before["programs"].get(key, {}).keys() - differences.keys())
        if not problems and self.partial and count > 0:
            found = self._without(found, new, differences)
        elif differences and not problems:
            problems = [f"{what}: {label}" for label, what in differences.items()]
        name = key if key == new else f"{key}, now {new}"
        if problems:
            self.refused += key in self.before["programs"] and key not in self.lines
            self.lines[key] = _listed(f"{name}: not carried", problems)
            return found
        line = f"{name}: carried from {began} to {self.current[new]}, {count} programs are the same"
        left = [f"its tests have not run: {label}, which {what}" for label, what in differences.items()]
        self.lines[key] = _listed(line, left)
        carried = None if began == self.current[new] else CarriedEvidence(digest=began, programs=count)
        return msgspec.structs.replace(found, digest=self.current[new], stale=False, carried=carried)

    def _without(self, found: FamilyEvidence, key: str, calls: Mapping[str, str]) -> FamilyEvidence:
        """Returns the evidence in which the tests of some calls have not run."""
        operations = {**found.operations}
        for label, what in calls.items():
            op = label.partition(", ")[0]
            tests = dict(tests_of(key, label, self.after["chip"]))
            field = "left_out" if what == NEW and only_pinned(key, label, self.after["chip"]) else "not_run"
            operations[op] = _without_tests(operations.get(op, Tally()), tests, field)
        return msgspec.structs.replace(found, operations=operations)

    def _problems(self, key: str, new: str, known: set[str]) -> Iterator[str]:
        """Yields why the programs of one implementation do not show that it is the same."""
        for content, each, which in ((self.before, key, "first"), (self.after, new, "second")):
            if each not in content["digests"]:
                yield f"the {which} file does not have it"
                return
            if not content["whole"]:
                yield f"the {which} file is about some operations alone"
        if self.before["digests"][key] not in known:
            yield f"the first file is of sources {self.before['digests'][key]}, the evidence of {', '.join(known)}"
        if self.after["digests"][new] != self.current[new]:
            yield f"the second file is of sources {self.after['digests'][new]}, those here are {self.current[new]}"
        if not self.before["programs"][key]:
            yield "it serves no call whose programs could be compared"
        yield from self._cpp_problems(key, new)

    def _cpp_problems(self, key: str, new: str) -> Iterator[str]:
        """Yields which handlers have kernels that are compiled to something else, or may be."""
        sources = {self.renamed.get(name, name): x for name, x in self.before["sources"].get(key, {}).items()}
        others = self.after["sources"].get(new, {})
        kernels, other_kernels = self._machine_code(self.before, key), self._machine_code(self.after, new)
        for name in sorted(sources.keys() | others.keys()):
            if sources.get(name) == others.get(name):
                continue
            if not (name in kernels and name in other_kernels):
                yield f"the C++ of {name} differs, and not both files have the machine code of its kernels"
            elif kernels[name] != other_kernels[name]:
                yield f"the C++ of {name} differs, and the machine code of its kernels"

    def _machine_code(self, content: Mapping[str, Any], key: str) -> dict[str, list[str]]:
        """Returns the digests of each handler's compiled kernels, by the name that the handler has now."""
        return {self.renamed.get(name, name): x for name, x in content.get("machine_code", {}).get(key, {}).items()}

    def _differences(self, key: str, new_key: str) -> dict[str, str]:
        """Returns what is different about a call, by its label."""
        old, new = (content["programs"].get(x, {}) for content, x in ((self.before, key), (self.after, new_key)))
        found: dict[str, str] = {}
        for label in sorted(old.keys() | new.keys()):
            if label not in new:
                found[label] = "is missing"
            elif label not in old and self._was_refused(key, label):
                found[label] = NEW
            elif label not in old:
                continue
            elif self._kernels(old[label]) != sorted(map(tuple, new[label]["kernels"])):
                found[label] = "differs"
            elif any(old[label].get(name) != new[label].get(name) for name in ("program", "later")):
                found[label] = "differs outside of its kernels"
        return found

    def _was_refused(self, key: str, label: str) -> bool:
        """Returns whether a call of the second file alone was refused, and not of a case that there was not yet."""
        cases = self.before.get("cases", {}).get(key)
        return cases is None or label.removesuffix(programs.GRADIENTS) in cases

    def _kernels(self, program: Mapping[str, Any]) -> list[tuple[str, str]]:
        return sorted((self.renamed.get(target, target), x) for target, x in program["kernels"])


def _listed(line: str, more: list[str]) -> str:
    rest = [f"  and {len(more) - SHOWN} more"] if len(more) > SHOWN else []
    return "\n".join([line, *(f"  {each}" for each in more[:SHOWN]), *rest])


def tests_of(key: str, label: str, chip: str) -> list[tuple[str, bool]]:
    """Returns the tests of a call, each with whether it is of those that dispatch serves.

    Args:
        key: Family and implementation.
        label: From a file of `programs`.
        chip: A name in `ejkernel.ops.device.DEVICES_BY_SHORT_NAME`.
    """
    op, _, case = label.removesuffix(programs.GRADIENTS).partition(", ")
    implementation = key.partition("/")[2]
    found: list[tuple[str, bool]] = []
    with programs.stand_ins(), target_device(chip):
        for test in listing.list_tests((implementation,), (op,)):
            # The suite tries candidates on one of all cases. Only the suite knows whether it is this case.
            if test.op == op and (test.unit == f"{op}, {case}" or test.unit.startswith(listing.CANDIDATES)):
                function, parameter = listing.resolve(test)
                found.append((test.id, not refusal_of(function)(parameter)))
    return found


def only_pinned(key: str, label: str, chip: str) -> bool:
    """Returns whether dispatch gives an implementation a call only where its platform is asked for."""
    op_name, _, case_name = label.removesuffix(programs.GRADIENTS).partition(", ")
    family, _, name = key.partition("/")
    implementation, op = implementations()[family, name], registry().ops[op_name]
    case = next(case for case in (*op.cases, *implementation.cases_of(op)) if case.name == case_name)
    with target_device(chip):
        direction = "backward" if label.endswith(programs.GRADIENTS) else "forward"
        return implementation.priority_for(abstract_record(op, case), find_device(chip), direction) < 0


def _without_tests(tally: Tally, tests: Mapping[str, bool], field: str) -> Tally:
    """Returns a tally in which some tests have not run; each is told of whether dispatch serves it.

    Of a call that was refused, the tests that are served now were refused then.
    """
    known = {*tally.not_run, *tally.failed, *tally.left_out}
    tests = {name: served for name, served in tests.items() if name not in known}
    if field == "left_out":
        served = sorted(name for name, served in tests.items() if served)
        refused = max(0, tally.refused - len(served))
        return msgspec.structs.replace(tally, refused=refused, left_out=(*tally.left_out, *served))
    passed = min(tally.passed, sum(tests.values()))
    refused = tally.refused - min(tally.refused, len(tests) - passed)
    not_run = (*tally.not_run, *sorted(tests))
    return msgspec.structs.replace(tally, passed=tally.passed - passed, refused=refused, not_run=not_run)
