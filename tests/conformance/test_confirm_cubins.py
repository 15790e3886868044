"""A kernel's digest is about its machine code, whatever the kernel is called."""

import struct

import pytest

from ejkernel_conformance.confirm.programs import cubins

SOURCE = """#include "common/amount.cuh"
namespace {space} {{
__global__ void {name}(float* x, int n) {{
  __shared__ float row[{elements}];
  row[threadIdx.x] = x[threadIdx.x] {operator} kAmount;
  __syncthreads();
  x[threadIdx.x] = row[n - threadIdx.x];
}}
}}
"""


def elf(kernel="scan", code=b"add", registers=32, shared=64, constants=b""):
    """A 64-bit ELF file with the sections of a cubin of one kernel."""
    contents = [("", 0, b"", 0, 0), (f".text.{kernel}", 1, code, 0, registers), (f".nv.info.{kernel}", 1, b"n", 0, 0)]
    contents += [(f".nv.shared.{kernel}", cubins.NOBITS, b"", shared, 0), (".nv.constant3", 1, constants, 0, 0)]
    names = "".join(f"{name}\0" for name, *_ in contents).encode() + b".names\0"
    contents.append((".names", 3, names, 0, 0))
    headers, body = b"", b""
    for name, kind, content, length, info in contents:
        offset, size = 64 + len(body), len(content) or length
        headers += struct.pack(
            "<IIQQQQIIQQ", names.index(f"{name}\0".encode()), kind, 0, 0, offset, size, 0, info, 1, 0
        )
        body += content
    start = b"\x7fELF\x02".ljust(40, b"\0") + struct.pack("<Q", 64 + len(body)) + bytes(10)
    return start + struct.pack("<HHH", 64, len(contents), len(contents) - 1) + body + headers


def test_a_name_does_not_count():
    (first,), (second,) = (list(cubins.kernels_in(elf(kernel)).values()) for kernel in ("scan", "scan_of_rows"))
    assert first == second


@pytest.mark.parametrize(
    "change",
    [{"code": b"sub"}, {"registers": 40}, {"shared": 128}, {"constants": b"1"}],
    ids=lambda change: min(change),
)
def test_instructions_registers_and_memory_count(change):
    assert cubins.kernels_in(elf()).keys() == {"scan"}
    assert cubins.kernels_in(elf()) != cubins.kernels_in(elf(**change))


def test_what_is_no_cubin_is_an_error():
    with pytest.raises(ValueError, match="64-bit ELF"):
        cubins.kernels_in(b"#include <cuda.h>")


@pytest.mark.needs("cuda compiler")
def test_compiled_kernels_are_the_same_under_other_names_alone(tmp_path):
    (tmp_path / "common").mkdir()
    (tmp_path / "common/amount.cuh").write_text("constexpr float kAmount = 3;")
    digests = []
    for n, change in enumerate(({}, {"space": "elsewhere", "name": "other"}, {"operator": "-"}, {"elements": 512})):
        path = tmp_path / f"{n}.cu"
        path.write_text(SOURCE.format(**{"space": "here", "name": "add", "operator": "+", "elements": 256} | change))
        digests.append(cubins.kernels_of(path, tmp_path, 9.0))
    assert digests[0] == digests[1]
    assert len(set(digests)) == 3
