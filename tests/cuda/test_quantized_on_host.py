"""The quantised matmul's CUDA kernels on the host: their numbers, what is refused, and the splits that are chosen."""

import ctypes
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel import explain
from ejkernel.families import quantized_matmul as family
from ejkernel.modules import quantized_matmul
from ejkernel.modules.operations.cases.quantized_matmul import MatmulSizes, make_base_inputs
from ejkernel.modules.operations.quantized_matmul import OP, QuantizedMatmulArguments
from ejkernel.ops.device import DeviceInfo, target_device
from ejkernel.ops.plugins import registry
from ejkernel.planning import quantized_formats
from ejkernel_cuda import library
from ejkernel_cuda import quantized_matmul as cuda
from ejkernel_cuda.quantized_matmul import cases
from ejkernel_cuda.quantized_matmul import config as splits
from ejkernel_cuda.quantized_matmul.config import QuantizedSplits
from ejkernel_cuda.quantized_matmul.forward import forward

H200 = DeviceInfo(platform="gpu", vendor="nvidia", kind="NVIDIA H200", compute_capability=9.0)
SHARED = {
    # Shared memory is that of the emulated block.
    f"extern __shared__ __align__({alignment}) char shared[];": "char* shared = device::current->block->shared;"
    for alignment in (16, 1024)
}
CASES = {case.name: case for case in cases.cases()["quantized_matmul"]}


@pytest.fixture(scope="session")
def kernels(compile_on_host):
    """The kernels' sources, compiled for the host with what stands in for CUDA."""
    function = compile_on_host("quantized_matmul", SHARED).quantized_matmul
    function.restype = ctypes.c_char_p
    return function


def run(kernels, record, config):
    """The output of a record, float32."""
    m, k, n = *record.x.shape, family.columns(record)
    x = np.array(record.x).view(np.uint16)
    words, scales, zeros = (np.array(getattr(record, name)) for name in ("packed", "scales", "zeros"))
    output = np.full((m, n), 0xFFFF, np.uint16)
    arrays = (ctypes.c_void_p * 5)(*(array.ctypes.data for array in (x, words, scales, zeros, output)))
    log_group = record.format.group_size.bit_length() - 1
    warpgroups = splits.uses_wgmma(record) or splits.uses_wgmma_without_transpose(record)
    numbers = (m, k, n, words.shape[1], scales.shape[1], log_group, record.transpose, warpgroups, config.splits)
    assert kernels(arrays, (ctypes.c_int * len(numbers))(*numbers)) is None
    return np.asarray(output.view(jnp.bfloat16), np.float32)


def sizes(m=16, k=4096, n=14336, dtype=jnp.bfloat16, transpose=False, **form):
    """Arguments of a call, without numbers."""
    made = MatmulSizes(m=m, k=k, n=n, dtype=dtype, transpose=transpose, **{"group_size": 64, **form})
    return jax.eval_shape(lambda: QuantizedMatmulArguments(**make_base_inputs(jax.random.key(0), made)))


def refusals(device=H200, name="cuda", **changes):
    """What an implementation has against a call."""
    with target_device(device):
        args = sizes(**changes)
        arrays = {name: getattr(args, name) for name in ("x", "w", "scales", "zeros")}
        options = {name: getattr(args, name) for name in ("transpose", "group_size", "bits", "mode")}
        decision = explain(quantized_matmul, **arrays, **options)
    [verdict] = [v for v in decision.forward.verdicts if v.implementation.name == name]
    return [reason for reason in verdict.reasons if library.COMPILED_MODULE not in reason]


@pytest.mark.needs("g++")
@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("name", CASES)
def test_products_match_the_reference(kernels, name, parts):
    record = OP.lower(CASES[name].make(jax.random.key(7)))
    want = np.asarray(family.reference(record)[0], np.float32)
    tolerance = OP.tolerance["bfloat16"]
    got = run(kernels, record, QuantizedSplits(splits=parts))
    np.testing.assert_allclose(got, want, rtol=tolerance.rtol, atol=tolerance.atol)


@pytest.mark.needs("g++")
@pytest.mark.parametrize(("m", "k", "n"), [(1, 4096, 36), (9, 4096, 32), (16, 512, 36), (8, 9216, 32)])
def test_products_without_split_k_match_the_reference(kernels, m, k, n):
    made = MatmulSizes(m=m, k=k, n=n, group_size=64, dtype=jnp.bfloat16, transpose=True)
    record = OP.lower(QuantizedMatmulArguments(**make_base_inputs(jax.random.key(5), made)))
    want = np.asarray(family.reference(record)[0], np.float32)
    got = run(kernels, record, QuantizedSplits(splits=0))
    assert np.linalg.norm(got - want) / np.linalg.norm(want) < 2e-3


@pytest.mark.needs("g++")
@pytest.mark.parametrize(
    ("m", "k", "n", "parts"), [(50, 2816, 40, 2), (33, 2048, 40, 1), (20, 2304, 40, 1), (17, 512, 40, 2)]
)
def test_products_of_the_wgmma_kernel_match_the_reference(kernels, m, k, n, parts):
    """Shares longer than the ring, rows of scales with and without 8 bytes more than whole 16, and an empty share."""
    made = MatmulSizes(m=m, k=k, n=n, group_size=64, dtype=jnp.bfloat16, transpose=True)
    record = OP.lower(QuantizedMatmulArguments(**make_base_inputs(jax.random.key(5), made)))
    want = np.asarray(family.reference(record)[0], np.float32)
    got = run(kernels, record, QuantizedSplits(splits=parts))
    assert np.linalg.norm(got - want) / np.linalg.norm(want) < 2e-3


@pytest.mark.needs("g++")
@pytest.mark.parametrize("m", [8, 16, 32, 48, 64])
@pytest.mark.parametrize("parts", [1, 3])
def test_products_of_the_wgmma_kernel_without_transpose_match_the_reference(kernels, m, parts):
    """Shares longer than the ring, and ends of the columns and the contracted elements within a block."""
    made = MatmulSizes(m=m - 1, k=712, n=384, group_size=64, dtype=jnp.bfloat16)
    record = OP.lower(QuantizedMatmulArguments(**make_base_inputs(jax.random.key(5), made)))
    want = np.asarray(family.reference(record)[0], np.float32)
    got = run(kernels, record, QuantizedSplits(splits=parts))
    assert np.linalg.norm(got - want) / np.linalg.norm(want) < 3e-3


@pytest.mark.needs("g++")
@pytest.mark.parametrize("shift", [20, 300, -300])
def test_zero_points_may_be_far_outside_the_range_of_codes(kernels, shift):
    made = MatmulSizes(m=9, k=256, n=128, group_size=64, dtype=jnp.bfloat16)
    given = make_base_inputs(jax.random.key(5), made)
    record = OP.lower(QuantizedMatmulArguments(**{**given, "zeros": given["zeros"] + shift}))
    want = np.asarray(family.reference(record)[0], np.float32)
    got = run(kernels, record, QuantizedSplits(splits=1))
    # Far beyond 120 what is rounded is not the weight alone.
    assert np.linalg.norm(got - want) / np.linalg.norm(want) < 4e-3


@pytest.mark.needs("g++")
def test_few_rows_of_wide_matrices_are_multiplied_by_the_mma_kernel(kernels):
    made = MatmulSizes(m=5, k=72, n=8192, group_size=64, dtype=jnp.bfloat16)
    record = OP.lower(QuantizedMatmulArguments(**make_base_inputs(jax.random.key(5), made)))
    assert not splits.uses_wgmma_without_transpose(record)
    weights = quantized_formats.decode(record.packed, record.scales, record.zeros, record.format)
    exact = np.asarray(record.x, np.float64) @ np.asarray(weights, np.float64)
    got = run(kernels, record, QuantizedSplits(splits=1))
    # Two roundings to bfloat16, of x times its scales and of the output: 1.66e-3 of the norm each.
    assert np.linalg.norm(got - exact) / np.linalg.norm(exact) < 2.4e-3


@pytest.mark.needs("g++")
@pytest.mark.parametrize("transpose", [False, True])
def test_products_stay_precise_if_x_has_a_large_mean(kernels, transpose):
    made = MatmulSizes(m=3, k=1024, n=128, group_size=64, dtype=jnp.bfloat16, transpose=transpose)
    given = make_base_inputs(jax.random.key(3), made)
    # x has a mean, and so have the sums that the offset is multiplied with.
    record = OP.lower(QuantizedMatmulArguments(**{**given, "x": given["x"] + 2}))
    want = np.asarray(family.reference(record)[0], np.float32)
    got = run(kernels, record, QuantizedSplits(splits=1))
    # Rounding of the output, and with rows first that of the weights.
    assert np.linalg.norm(got - want) / np.linalg.norm(want) < 4e-3


def test_conformance_cases_are_served():
    (served,) = cuda.IMPLEMENTATIONS
    [triton] = [x for x in registry().implementations["quantized_matmul"] if x.name == "triton"]
    with target_device(H200):
        for case in CASES.values():
            record = jax.eval_shape(OP.lower, jax.eval_shape(case.make, jax.random.key(0)))
            assert not list(served.requires.extra(record)), case.name
            # The cases without transpose are too narrow to come before Triton.
            ranks = (x.priority_for(record, H200, "forward") for x in (served, triton))
            assert (next(ranks) > next(ranks)) == record.transpose, case.name


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"m": 65}, "x: got 65 rows, the kernels have at most 64"),
        ({"dtype": jnp.float16}, "dtype float16 is not among bfloat16"),
        ({"bits": 8}, "mode: got affine codes of 8 bits, the kernels multiply affine codes of 4 bits"),
        ({"mode": "nf4"}, "mode: got nf4 codes of 4 bits, the kernels multiply affine codes of 4 bits"),
        ({"group_size": 32}, "group_size: got 32, the kernels have at least 64"),
        ({"group_size": 128}, "group_size: got 128, without transpose the kernels have 64"),
        ({"n": 64 * 21}, "scales: got rows of 21, the kernels read multiples of 4 bytes"),
        ({"n": 130, "transpose": True}, "w: got 130 columns, the kernels have a multiple of 4"),
        ({"k": 100}, "x: got rows of 100 elements, the kernels read multiples of 16 bytes"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_unsupported_calls_are_refused_with_the_argument_name(changes, sentence):
    assert sentence in refusals(**changes)


def test_supported_calls_are_served():
    assert refusals() == refusals(m=64, transpose=True, group_size=128) == []


@pytest.mark.parametrize("changes", [{"m": 64}, {"k": 14336, "n": 4096}, {"m": 1, "n": 4096}])
def test_wide_matrices_are_served(changes):
    assert refusals(**changes) == []


def ranks(**changes):
    record = jax.eval_shape(OP.lower, sizes(**changes))
    return {i.name: i.priority_for(record, H200) for i in registry().implementations[OP.name]}


def test_priority_of_narrow_matrices_is_below_triton():
    assert refusals(n=2048) == refusals(transpose=True, n=2048) == []
    wide, turned, narrow = ranks(n=4096), ranks(n=2048, transpose=True), ranks(n=2048)
    assert wide["cuda"] == turned["cuda"] > wide["triton"] > narrow["cuda"] > wide["xla"]


@pytest.mark.parametrize("capability", [8.0, 10.0, 12.0])
def test_chips_other_than_hopper_are_refused(capability):
    assert any("9.0" in reason for reason in refusals(dataclasses.replace(H200, compute_capability=capability)))


@pytest.mark.parametrize(
    ("rows", "k", "n", "transpose", "parts"),
    [
        ((1, 16), 4096, 14336, True, 4),
        ((17, 64), 4096, 14336, True, 2),
        ((1, 8), 4096, 14336, False, 8),
        ((9, 64), 4096, 14336, False, 2),
        ((1, 32), 14336, 4096, False, 6),
        ((17, 32), 14336, 4096, True, 6),
        ((1, 16, 32), 128, 128, True, 1),
        ((1, 32), 128, 128, False, 1),
    ],
)
def test_splits_fill_the_chip_in_one_wave(rows, k, n, transpose, parts):
    for m in rows:
        record = jax.eval_shape(OP.lower, sizes(m=m, k=k, n=n, transpose=transpose))
        assert splits.heuristic(record, H200, "forward") == QuantizedSplits(splits=parts)


@pytest.mark.parametrize(("k", "n"), [(14336, 4096), (4096, 4096), (8192, 3072)])
def test_narrow_matrices_take_no_split_k(k, n):
    for m in (1, 16):
        record = jax.eval_shape(OP.lower, sizes(m=m, k=k, n=n, transpose=True))
        assert splits.heuristic(record, H200, "forward") == QuantizedSplits(splits=0)


@pytest.mark.parametrize(
    ("changes", "possible"),
    [
        ({"m": 17}, False),
        ({"transpose": False}, False),
        ({"group_size": 128}, False),
        ({"k": 14400}, False),
        ({"k": 2048}, True),
        ({"n": 14336}, True),
        ({"n": 1024}, True),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_calls_that_are_not_narrow_take_split_k(changes, possible):
    record = jax.eval_shape(OP.lower, sizes(**{"transpose": True, "k": 14336, "n": 4096, **changes}))
    assert splits.heuristic(record, H200, "forward").splits > 0
    assert (QuantizedSplits(splits=0) in splits.candidates(record, H200, "forward")) == possible


@pytest.mark.parametrize(
    ("m", "transpose", "symbol"),
    [(8, False, "matmul"), (16, True, "matmul"), (16, False, "rows"), (64, True, "warpgroups")],
)
def test_the_call_lowers(monkeypatch, m, transpose, symbol):
    monkeypatch.setattr("ejkernel_cuda.quantized_matmul.forward.register_handler", lambda symbol: symbol)
    call = functools.partial(forward, config=QuantizedSplits(splits=4))
    record = jax.eval_shape(OP.lower, sizes(m=m, transpose=transpose))
    text = jax.jit(call).trace(record).lower(lowering_platforms=("cuda",)).as_text()
    assert f"@ejkernel_quantized_{symbol}" in text
    assert f"tensor<{m}x14336xbf16>" in text
