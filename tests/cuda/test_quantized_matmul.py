"""The quantised matmul's CUDA kernels on the host: their numbers, what is refused, and the tiles that are chosen."""

import ctypes
import dataclasses
import functools
import shutil
import subprocess
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel import explain
from ejkernel.families import quantized_matmul as family
from ejkernel.modules import quantized_matmul
from ejkernel.modules.operations.cases.quantized_matmul import MatmulSizes, inputs
from ejkernel.modules.operations.quantized_matmul import OP, QuantizedMatmulArguments
from ejkernel.ops.device import DeviceInfo, target_device
from ejkernel_cuda import library
from ejkernel_cuda.quantized_matmul import cases, tiles
from ejkernel_cuda.quantized_matmul.tiles import QuantizedTiles

H200 = DeviceInfo(platform="gpu", vendor="nvidia", kind="NVIDIA H200", compute_capability=9.0)
SOURCES = Path(__file__).parents[2] / "packages" / "ejkernel-cuda" / "csrc"
ON_HOST = Path(__file__).parent / "on_host"
SHARED = {  # Shared memory is that of the emulated block.
    "extern __shared__ __align__(16) char shared[];": "char* shared = device::current->block->shared;",
    "__shared__ float table[16];": "float* table = device::current->block->table;",
}
ARRAYS = ("x", "words", "scales", "zeros", "output", "parts")
NUMBERS = ("m", "k", "n", "row_words", "row_groups", "log_group", "code", "scale", "transpose", "wide")
NUMBERS = (*NUMBERS, "splits", "stages", "cluster", "bfloat")


@pytest.fixture(scope="session")
def kernels(tmp_path_factory):
    """The kernels' sources, compiled for the host with what stands in for CUDA."""
    if shutil.which("g++") is None:
        pytest.skip("the kernels were not run: no g++")
    folder = tmp_path_factory.mktemp("on_host")
    for name in ("quantized_matmul.cuh", "quantized_codes.cuh"):
        text = (SOURCES / name).read_text()
        for cuda, host in SHARED.items():
            text = text.replace(cuda, host)
        (folder / name).write_text(text)
    for path in ON_HOST.iterdir():
        shutil.copy(path, folder)
    command = ("g++", "-std=c++20", "-O1", "-w", "-I.", "-shared", "-fPIC", "-o", "host.so", "quantized_matmul.cpp")
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    function = ctypes.CDLL(str(folder / "host.so")).quantized_matmul
    function.restype = ctypes.c_char_p
    return function


def run(kernels, record, config):
    """The output of a record, float32."""
    m, k, n = *record.x.shape, family.columns(record)
    names = ("packed", "scales", "zeros")
    x = np.array(record.x).view(np.uint16)
    words, scales, zeros = (np.array([] if v is None else v) for v in (getattr(record, name) for name in names))
    output, parts = np.full((m, n), 0xFFFF, np.uint16), np.full((config.splits, m, n), np.nan, np.float32)
    arrays = (ctypes.c_void_p * 6)(*(array.ctypes.data for array in (x, words, scales, zeros, output, parts)))
    made = tiles.attributes(record)
    bfloat = record.x.dtype == jnp.bfloat16
    values = (m, k, n, words.shape[1], scales.shape[1], made["log_group"], made["code"], made["scale"])
    values += (record.transpose, config.block_n == 256, config.splits, config.num_stages, config.cluster, bfloat)
    assert kernels(arrays, (ctypes.c_int * len(NUMBERS))(*values)) is None
    if config.splits > 1 and not config.cluster:
        return parts.sum(axis=0)
    return np.asarray(output.view(record.x.dtype), np.float32)


CONFIGS = (
    QuantizedTiles(block_n=256, splits=1, num_stages=3, cluster=False),
    QuantizedTiles(block_n=128, splits=3, num_stages=4, cluster=True),
    QuantizedTiles(block_n=128, splits=2, num_stages=5, cluster=False),
)


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: f"{c.block_n}-{c.splits}-{'cluster' if c.cluster else ''}")
@pytest.mark.parametrize("case", cases.cases()["quantized_matmul"], ids=lambda case: case.name)
def test_numbers(kernels, case, config):
    record = OP.lower(case.make(jax.random.key(7)))
    want = np.asarray(family.reference(record)[0], np.float32)
    got, tolerance = run(kernels, record, config), OP.tolerance[record.x.dtype.name]
    np.testing.assert_allclose(got, want, rtol=tolerance.rtol, atol=tolerance.atol)
