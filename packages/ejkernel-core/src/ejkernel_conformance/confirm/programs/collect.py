"""Writing the programs of all calls to a file."""

import contextlib
import importlib
import importlib.metadata
import importlib.util
import json
import platform
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ejkernel_conformance.confirm.programs.calls import GRADIENTS, Listed, listed
from ejkernel_conformance.confirm.programs.cpp_sources import machine_code, sources_of, tokens
from ejkernel_conformance.confirm.programs.graph import Programs, summary
from ejkernel_conformance.confirm.programs.normalise import digest
from ejkernel_conformance.confirm.programs.stand_ins import later_jax_triton, stand_ins

FORMAT = 1
TOOLCHAIN = ("jax", "jaxlib", "triton", "numpy")


def collect(
    out: Path,
    names: Sequence[str] = (),
    ops: Sequence[str] = (),
    chip: str = "h200",
    against: Path | None = None,
    texts: Path | None = None,
) -> dict[str, Any]:
    """Writes what the calls of implementations lower to, and returns it.

    Args:
        out: File to write. What an earlier call left in it is kept where the same sources made it.
        names: Implementations; none for all that have evidence.
        ops: Operations; none for all.
        chip: The chip that they are lowered for.
        against: Another such file: what has the same digest there is left out.
        texts: Folder for the programs and kernels as text.
    """
    with stand_ins() as handlers:
        other = json.loads(against.read_text()) if against else {"digests": {}}
        subjects = [x for x in listed(names, ops, chip) if other["digests"].get(x.key) != x.digest]
        content: dict[str, Any] = {
            "format": FORMAT,
            "chip": chip,
            "toolchain": toolchain(),
            "tree": tree_digest(),
            "whole": all(x.is_whole for x in subjects),
            "digests": {x.key: x.digest for x in subjects},
            "programs": {x.key: {} for x in subjects},
            "sources": {},
            "machine_code": {},
            "cases": {x.key: x.cases for x in subjects},
        }
        _keep_earlier(out, content)
        for subject in subjects:
            began, made = time.monotonic(), content["programs"][subject.key]
            _add_programs(subject, made, handlers, texts)
            files = sources_of(made)
            content["sources"][subject.key] = {name: digest(tokens(path)) for name, path in files.items()}
            content["machine_code"][subject.key] = machine_code(files, chip)
            out.write_text(json.dumps(content, indent=1, sort_keys=True) + "\n")
            print(f"{subject.key}: {len(made)} programs, {time.monotonic() - began:.0f} s", flush=True)
        out.write_text(json.dumps(content, indent=1, sort_keys=True) + "\n")
        return content


def _add_programs(subject: Listed, made: Programs, handlers: set[str], texts: Path | None) -> None:
    """Lowers the calls of an implementation that are not yet there."""
    for label, call in subject.calls():
        if label in made:
            continue
        try:
            made[label] = summary(call, handlers, texts and texts / _file_name(subject.key, label))
        except Exception as error:
            # An argument that has no gradient, such as slopes: the program without gradients stands for the call.
            if isinstance(error, NotImplementedError) and label.endswith(GRADIENTS):
                continue
            error.add_note(f"{subject.key} on {label} cannot be lowered")
            raise
    # jax-triton 0.4 passes memory that an output takes over in another way.
    again = [label for label, one in made.items() if one["aliases"] and "later" not in one]
    if again:
        with later_jax_triton():
            calls = dict(subject.calls())
            for label in again:
                made[label]["later"] = summary(calls[label], handlers)["program"]


def _keep_earlier(out: Path, content: dict[str, Any]) -> None:
    """Takes over what a file has of the same sources, chip and toolchain: a run that was ended is continued."""
    if not out.exists():
        return
    earlier = json.loads(out.read_text())
    if any(earlier.get(key) != content[key] for key in ("format", "chip", "toolchain", "tree")):
        return
    for key, programs in earlier["programs"].items():
        if earlier["digests"][key] == content["digests"].get(key, earlier["digests"][key]):
            for part in ("programs", "digests", "sources", "cases", "machine_code"):
                content[part].setdefault(key, earlier.get(part, {}).get(key, {}))
            content["programs"][key] = programs


def _file_name(key: str, label: str) -> str:
    return re.sub(r"[^A-Za-z0-9]+", "_", f"{key} {label}")


def toolchain() -> dict[str, str]:
    """Returns the versions of what programs are made with."""
    found = {"python": ".".join(platform.python_version_tuple()[:2])}
    for name in TOOLCHAIN:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def tree_digest() -> str:
    """Returns a digest of all Python sources that are imported here, core's among them, which no kernel's digest
    covers.
    """
    texts: list[str] = []
    for name in ("ejkernel", "ejkernel_conformance", "ejkernel_triton", "ejkernel_pallas", "ejkernel_cuda"):
        spec = importlib.util.find_spec(name)
        for folder in spec.submodule_search_locations or () if spec else ():
            texts += [digest(path.read_text(encoding="utf-8")) for path in sorted(Path(folder).rglob("*.py"))]
    return digest("\n".join(texts))
