"""Machine code of CUDA sources, so that two trees can be compared on a machine with the compiler and without a GPU.

A change of names, folders or headers must leave the instructions of every kernel as they are. nvcc compiles each source
to a cubin, an ELF file with a section of instructions for each kernel. A kernel counts as the bytes of its sections:
instructions with their control codes, registers, the layout of its parameters and its shared memory. Its name does not
count. The host's code, which launches kernels, is not in a cubin.

This file imports nothing of ejkernel, for it runs against the packages of another tree, too.
"""

import functools
import hashlib
import importlib.util
import shutil
import struct
import subprocess
import tempfile
from pathlib import Path

# As CMakeLists.txt of ejkernel-cuda has them, in its release build.
OPTIONS = ("-std=c++17", "-O3", "-DNDEBUG", "--diag-suppress=940,2473")
ARCHITECTURE_SPECIFIC = (90,)
"""Chips whose instructions for warpgroups the compiler has under a name with an `a` alone."""
NOBITS = 8
"""The type of an ELF section that has a size and no bytes, such as shared memory."""


def compiler() -> str | None:
    """Returns the path of nvcc: that of the package index, as builds of wheels have it, or the one on the path."""
    spec = importlib.util.find_spec("nvidia.cu13") if importlib.util.find_spec("nvidia") else None
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        if (path := Path(folder) / "bin/nvcc").is_file():
            return str(path)
    return shutil.which("nvcc")


@functools.cache
def kernels_of(source: Path, root: Path, capability: float) -> tuple[str, ...]:
    """Returns a digest of each kernel that a CUDA source is compiled to, in order of the digests.

    nvcc may order the instructions of a large kernel otherwise the next time: where one differs, compile it again.

    Args:
        source: A `.cu` file.
        root: The folder that its includes are relative to.
        capability: The chip's, for example 9.0.

    Raises:
        ValueError: The compiler refuses the source.
    """
    number = round(capability * 10)
    architecture = f"-arch=sm_{number}{'a' if number in ARCHITECTURE_SPECIFIC else ''}"
    spec = importlib.util.find_spec("jaxlib")
    (jaxlib,) = (spec.submodule_search_locations or [""]) if spec else [""]
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "kernels.cubin"
        includes = ("-I", str(root), "-isystem", str(Path(jaxlib) / "include"))
        command = (str(compiler()), "-cubin", architecture, *OPTIONS, *includes, str(source), "-o", str(out))
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise ValueError(f"{source}: nvcc failed: {done.stderr[-2000:]}")
        return tuple(sorted(kernels_in(out.read_bytes()).values()))


def kernels_in(cubin: bytes) -> dict[str, str]:
    """Returns a digest of each kernel of a cubin, by its symbol."""
    content = sections(cubin)
    names = [name.removeprefix(".text.") for name in content if name.startswith(".text.")]
    data = {name: x for name, x in content.items() if name.startswith((".nv.global", ".nv.constant"))}
    shared = {name: x for name, x in data.items() if not name.endswith(tuple(f".{each}" for each in names))}
    return {name: _digest({**shared, **_sections_of(name, content)}) for name in names}


def _sections_of(kernel: str, content: dict[str, bytes]) -> dict[str, bytes]:
    """Returns the sections of one kernel, by their names without its symbol."""
    end = f".{kernel}"
    return {name.removesuffix(end): x for name, x in content.items() if name.endswith(end)}


def _digest(content: dict[str, bytes]) -> str:
    digest = hashlib.sha256()
    for name, each in sorted(content.items()):
        digest.update(f"{name} {len(each)}\n".encode() + each)
    return digest.hexdigest()[:16]


def sections(elf: bytes) -> dict[str, bytes]:
    """Returns the content of each section of a 64-bit ELF file, after what its header says of it."""
    if elf[:5] != b"\x7fELF\x02":
        raise ValueError(f"{elf[:5]!r} does not begin a 64-bit ELF file")
    (table,) = struct.unpack_from("<Q", elf, 40)
    size, count, name_section = struct.unpack_from("<HHH", elf, 58)
    headers = [struct.unpack_from("<IIQQQQIIQQ", elf, table + n * size) for n in range(count)]
    found: dict[str, bytes] = {}
    for name, kind, flags, _, offset, length, _, info, alignment, _ in headers:
        first = headers[name_section][4] + name
        label = elf[first : elf.index(b"\0", first)].decode()
        # The `info` of a section of instructions is the number of registers, that of others the index of a section.
        about = (kind, length, alignment) if not label.startswith(".text.") else (kind, flags, length, alignment, info)
        found[label] = repr(about).encode() + (b"" if kind == NOBITS else elf[offset : offset + length])
    return found
