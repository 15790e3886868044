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
from ejkernel_cuda import quantized_matmul as cuda
from ejkernel_cuda.quantized_matmul import cases, tiles
from ejkernel_cuda.quantized_matmul.forward import forward
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
    for source in SOURCES.glob("quantized_*.cuh"):
        text = source.read_text()
        for device, host in SHARED.items():
            text = text.replace(device, host)
        (folder / source.name).write_text(text)
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
    QuantizedTiles(block_n=256, splits=2, num_stages=5, cluster=False),
)


def sizes(m=16, k=4096, n=14336, dtype=jnp.bfloat16, transpose=False, **form):
    """Arguments of a call, without numbers."""
    made = MatmulSizes(m=m, k=k, n=n, dtype=dtype, transpose=transpose, **{"group_size": 64, **form})
    return jax.eval_shape(lambda: QuantizedMatmulArguments(**inputs(jax.random.key(0), made)))


def refusals(device=H200, **changes):
    """What the implementation has against a call."""
    with target_device(device):
        args = sizes(**changes)
        arrays = {name: getattr(args, name) for name in ("x", "w", "scales", "zeros")}
        options = {name: getattr(args, name) for name in ("transpose", "group_size", "bits", "mode")}
        decision = explain(quantized_matmul, **arrays, **options)
    [verdict] = [v for v in decision.forward.verdicts if v.implementation.name == "cuda"]
    return [reason for reason in verdict.reasons if library.MODULE not in reason]


@pytest.mark.slow
@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: f"{c.block_n}-{c.splits}-{'cluster' if c.cluster else ''}")
@pytest.mark.parametrize("case", cases.cases()["quantized_matmul"], ids=lambda case: case.name)
def test_numbers(kernels, case, config):
    record = OP.lower(case.make(jax.random.key(7)))
    want = np.asarray(family.reference(record)[0], np.float32)
    got, tolerance = run(kernels, record, config), OP.tolerance[record.x.dtype.name]
    np.testing.assert_allclose(got, want, rtol=tolerance.rtol, atol=tolerance.atol)


def test_cases_are_served():
    for case in cases.cases()["quantized_matmul"]:
        record = OP.lower(jax.eval_shape(case.make, jax.random.key(0)))
        [implementation] = cuda.IMPLEMENTATIONS
        assert not list(implementation.requires.extra(record)), case.name


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"m": 65}, "x has 65 rows, more than 64"),
        ({"dtype": jnp.float32}, "dtype float32 is not among bfloat16, float16"),
        ({"bits": 3}, "bits 3: the kernels unpack codes of 4 and 8"),
        ({"group_size": 16}, "groups of 16 are smaller than 32"),
        ({"n": 64 * 21}, "rows of 21 scales are not multiples of 4 bytes"),
        ({"n": 130, "transpose": True}, "130 columns are not a multiple of 4"),
        ({"k": 100}, "rows of 100 numbers of x are not multiples of 16 bytes"),
        ({"n": 144, "mode": "nf4", "group_size": 16}, "rows of 18 words of w are not multiples of 16 bytes"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_it_refuses_by_name(changes, sentence):
    assert sentence in refusals(**changes)


def test_it_serves_what_it_is_made_for():
    assert refusals() == refusals(m=64, transpose=True, dtype=jnp.float16, bits=8) == []
    assert refusals(mode="mxfp8", group_size=32) == refusals(mode="nf4", transpose=True) == []


@pytest.mark.parametrize("transpose", [False, True])
@pytest.mark.parametrize("m", [1, 16, 32, 64])
@pytest.mark.parametrize(("k", "n"), [(4096, 14336), (14336, 4096), (96, 128)])
@pytest.mark.parametrize("capability", [8.0, 8.9, 9.0, 10.0, 12.0])
def test_tiles_fit_the_chip(capability, k, n, m, transpose):
    device = dataclasses.replace(H200, compute_capability=capability)
    record = OP.lower(sizes(m=m, k=k, n=n, transpose=transpose, group_size=32))
    found = tiles.candidates(record, device, "forward")
    if not found:
        changes = {"m": m, "k": k, "n": n, "transpose": transpose, "group_size": 32}
        assert f"{m} rows of x do not fit into this chip's shared memory beside the words" in refusals(
            device, **changes
        )
        assert m > 16
        assert capability in (8.9, 12.0)
        return
    assert found[0] == tiles.heuristic(record, device, "forward")
    _, shared = tiles.CHIPS[capability]
    for config in found:
        assert tiles.block_bytes(record, config) <= (shared - 1) * 1024
        assert not config.cluster or capability in (9.0, 12.0)


def test_the_call_lowers(monkeypatch):
    monkeypatch.setattr("ejkernel_cuda.quantized_matmul.forward.registered", lambda symbol: symbol)
    given = OP.lower(sizes())
    for cluster, parts in ((True, "tensor<0xf32>"), (False, "tensor<4x16x14336xf32>")):
        config = QuantizedTiles(block_n=256, splits=4, num_stages=3, cluster=cluster)
        call = functools.partial(forward, config=config)
        text = jax.jit(call).trace(given).lower(lowering_platforms=("cuda",)).as_text()
        assert "@ejkernel_quantized_matmul" in text
        assert parts in text
