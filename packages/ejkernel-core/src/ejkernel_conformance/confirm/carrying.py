"""Evidence for sources that lower to the programs that a chip has confirmed."""

import dataclasses
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from ejkernel.ops import evidence
from ejkernel.ops.evidence import Carried, Confirmation, EvidenceFile, FamilyEvidence
from ejkernel.ops.model import Implementation
from ejkernel_conformance.confirm import merging, programs
from ejkernel_conformance.confirm.toolchain import digests, implementations

SHOWN = 12
"""How many calls a refusal names."""


@dataclasses.dataclass(frozen=True)
class Carrying:
    """What became of the evidence.

    Attributes:
        lines: A sentence about each implementation whose sources have changed.
        written: The files that were written or removed.
        refused: How many implementations could not be carried.
    """

    lines: tuple[str, ...]
    written: tuple[Path, ...]
    refused: int


def read(path: Path) -> dict[str, Any]:
    """The content of a file that `programs` wrote.

    Raises:
        ValueError: It is none, or of another version.
    """
    content = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(content, dict) or content.get("format") != programs.FORMAT:
        raise ValueError(f"{path}: is no file of `programs`, or of another version; this one reads {programs.FORMAT}")
    return content


def parse_renamed(pairs: Iterable[str]) -> dict[str, str]:
    """Old names and new ones, from `old=new`.

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


def carry(before: Mapping[str, Any], after: Mapping[str, Any], renamed: Mapping[str, str]) -> Carrying:
    """Renews the digests of evidence whose implementations lower to the same programs, and marks what is stale.

    Args:
        before: Programs of the sources that a chip has confirmed.
        after: Programs of the sources as they are.
        renamed: Old name -> new name, of families, implementations, `family/implementation` and FFI handlers.

    Raises:
        ValueError: The two files are not of the same chip and toolchain.
    """
    for what in ("chip", "toolchain"):
        if before[what] != after[what]:
            raise ValueError(f"the two files are not of the same {what}: {before[what]} and {after[what]}")
    known = {key: one for key, one in implementations().items() if one.evidence is not None}
    judge = _Judge(before, after, renamed, digests(known))
    old = dict(_files(known))
    new = _carried(old, known, judge)
    written: list[Path] = []
    for path in sorted(old.keys() | new.keys()):
        content = merging.with_marks(new[path], judge.current) if path in new else None
        if content is None or not content.confirmations:
            path.unlink(missing_ok=True)
        elif content != old.get(path):
            path.write_bytes(evidence.encode(content))
        else:
            continue
        written.append(path)
    return Carrying(tuple(judge.lines.values()), tuple(written), judge.refused)


def _files(known: Mapping[tuple[str, str], Implementation]) -> Iterator[tuple[Path, EvidenceFile]]:
    """All evidence files of the backends, those of implementations that have another name now among them."""
    for folder in sorted({str(one.evidence) for one in known.values()}):
        for file in evidence.evidence_files(folder):
            yield Path(str(file)), evidence.decode(file.read_bytes())


def _carried(
    old: Mapping[Path, EvidenceFile], known: Mapping[tuple[str, str], Implementation], judge: "_Judge"
) -> dict[Path, EvidenceFile]:
    """The files with every family at the name that it has now."""
    new: dict[Path, EvidenceFile] = {}
    folders = {name: str(one.evidence) for (_, name), one in known.items()}
    for path, file in old.items():
        for one in file.confirmations:
            for family, found in one.families.items():
                key = judge.new_key(f"{family}/{file.implementation}")
                if key not in judge.current:
                    continue
                family_now, _, name = key.partition("/")
                same = name == file.implementation
                to = path if same else merging.evidence_path(folders[name], file.chip, name)
                empty = EvidenceFile(implementation=name, chip=file.chip, confirmations=(), kind=file.kind)
                moved = msgspec.structs.replace(one, families={family_now: judge.judged(file, family, found, same)})
                new[to] = _with(new.get(to, empty), moved)
    return new


def _with(file: EvidenceFile, one: Confirmation) -> EvidenceFile:
    """The file with a further family of a confirmation."""
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
    ) -> None:
        self.before, self.after, self.renamed, self.current = before, after, renamed, current
        self.lines: dict[str, str] = {}
        self.refused = 0

    def new_key(self, key: str) -> str:
        """What a `family/implementation` is called now."""
        if key in self.renamed:
            return self.renamed[key]
        family, _, name = key.partition("/")
        return f"{self.renamed.get(family, family)}/{self.renamed.get(name, name)}"

    def judged(self, file: EvidenceFile, family: str, found: FamilyEvidence, same_name: bool) -> FamilyEvidence:
        """The evidence with the digest of the sources as they are, where they lower to the same."""
        key = f"{family}/{file.implementation}"
        new, began = self.new_key(key), found.carried.digest if found.carried else found.digest
        if found.digest == self.current[new] and same_name:
            return found
        known = {found.digest, began}
        problems = list(self._problems(key, new, known))
        count = len(self.before["programs"].get(key, ()))
        name = key if key == new else f"{key}, now {new}"
        if problems:
            self.refused += key in self.before["programs"] and key not in self.lines
            shown = [f"  {problem}" for problem in problems[:SHOWN]]
            more = [f"  and {len(problems) - SHOWN} more"] if len(problems) > SHOWN else []
            self.lines[key] = "\n".join([f"{name}: not carried", *shown, *more])
            return found
        self.lines[key] = f"{name}: carried from {began} to {self.current[new]}, {count} programs are the same"
        return msgspec.structs.replace(
            found, digest=self.current[new], stale=False, carried=Carried(digest=began, programs=count)
        )

    def _problems(self, key: str, new: str, known: set[str]) -> Iterator[str]:
        """Why the programs of one implementation do not show that it is the same."""
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
        yield from self._differences(self.before["programs"][key], self.after["programs"][new])
        sources = {self.renamed.get(name, name): x for name, x in self.before["sources"].get(key, {}).items()}
        others = self.after["sources"].get(new, {})
        for name in sorted(sources.keys() | others.keys()):
            if sources.get(name) != others.get(name):
                yield f"the C++ of {name} differs"

    def _differences(self, old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[str]:
        if not old:
            yield "it serves no call whose programs could be compared"
        for label in sorted(old.keys() | new.keys()):
            if label not in new:
                yield f"missing: {label}"
            elif label not in old:
                yield f"new: {label}"
            elif self._kernels(old[label]) != sorted(map(tuple, new[label]["kernels"])):
                yield f"differs: {label}"
            elif any(old[label].get(name) != new[label].get(name) for name in ("program", "later")):
                yield f"differs outside of its kernels: {label}"

    def _kernels(self, program: Mapping[str, Any]) -> list[tuple[str, str]]:
        return sorted((self.renamed.get(target, target), x) for target, x in program["kernels"])
