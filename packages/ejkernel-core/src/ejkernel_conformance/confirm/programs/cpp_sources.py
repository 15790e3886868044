"""The C++ that the handlers of an implementation are compiled from."""

import functools
import importlib.util
import re
from collections.abc import Mapping
from pathlib import Path

from ejkernel_conformance.confirm.programs import cubins
from ejkernel_conformance.confirm.programs.graph import Programs

HANDLER = re.compile(r"(?:XLA_FFI_DEFINE_HANDLER_SYMBOL|EJKERNEL_FFI_HANDLER)\(\s*(\w+)")
INCLUDE = re.compile(r'^\s*#\s*include\s+"([^"]+)"[^\n]*\n', re.MULTILINE)
COMMENT = re.compile(r'"(?:\\.|[^"\\\n])*"|//[^\n]*|/\*.*?\*/', re.DOTALL)
ONCE = re.compile(r"^\s*#\s*pragma\s+once\s*$", re.MULTILINE)


def sources_of(programs: Programs) -> dict[str, Path]:
    """Returns the C++ file of each handler that programs of an implementation call, by the handler's name."""
    used = {target for one in programs.values() for target, _ in one["kernels"]}
    files = sorted(_root().rglob("*.cu"))
    defined = {name: path for path in files for name in HANDLER.findall(path.read_text(encoding="utf-8"))}
    return {name: defined[name] for name in sorted(used & defined.keys())}


def machine_code(files: Mapping[str, Path], chip: str) -> dict[str, list[str]]:
    """Returns a digest of each kernel that the C++ files of handlers are compiled to; nothing where nvcc is missing."""
    from ejkernel.ops.device import find_device

    if not cubins.compiler():
        return {}
    capability = find_device(chip).compute_capability
    return {name: list(cubins.kernels_of(path, _root(), capability)) for name, path in files.items()}


@functools.cache
def _root() -> Path:
    """Returns the folder of the C++ sources, which their includes are relative to; it need not exist."""
    spec = importlib.util.find_spec("ejkernel_cuda")
    folders = spec.submodule_search_locations if spec else None
    return (Path(folders[0]).parents[1] if folders else Path()) / "csrc"


def tokens(path: Path) -> str:
    """Returns a C++ source with all that it includes of the tree, and the sources that define what those declare, as
    tokens.
    """
    seen: list[Path] = []
    texts = [_expanded(path, seen)]
    for header in list(seen):
        if header != path and header.with_suffix(".cu").is_file():
            texts.append(_expanded(header.with_suffix(".cu"), seen))
    return "\n".join(texts)


def _expanded(path: Path, seen: list[Path]) -> str:
    if path in seen:
        return ""
    seen.append(path)
    text = COMMENT.sub(lambda found: found[0] if found[0].startswith('"') else " ", path.read_text(encoding="utf-8"))

    def included(found: re.Match[str]) -> str:
        for file in (path.parent / found[1], _root() / found[1]):
            if file.is_file():
                return f" {_expanded(file, seen)} "
        return found[0]

    return " ".join(ONCE.sub("", INCLUDE.sub(included, text)).split())
