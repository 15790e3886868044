"""The CUDA kernels of the lightning indexer on the host: scores, the selection, and the call of both."""

import ctypes
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.families.lightning_indexer import reference
from ejkernel.modules.operations.lightning_indexer import OP
from ejkernel.ops.device import DeviceInfo, target_device
from ejkernel_cuda.lightning_indexer import IMPLEMENTATIONS, cases, config, forward

[IMPLEMENTATION] = IMPLEMENTATIONS

REPLACED = {"extern __shared__ __align__(1024) char memory[];": "char* memory = device::current->block->shared;"}
E4M3 = jnp.float8_e4m3fn


@pytest.fixture(scope="module")
def library(compile_on_host):
    """The kernels' sources, compiled for the host with what stands in for CUDA."""
    library = compile_on_host("lightning_indexer", REPLACED)
    for function in (library.indexer_scores, library.indexer_select):
        function.restype = ctypes.c_char_p
        function.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
    return library


def run(function, arrays, *sizes):
    """Calls a kernel with arrays of the host; None is an absent one."""
    pointers = (ctypes.c_void_p * len(arrays))(*(None if x is None else x.ctypes.data for x in arrays))
    assert function(pointers, (ctypes.c_int * len(sizes))(*sizes)) is None


def ordered_integers(x):
    """Float32 as integers in the order of numbers."""
    bits = np.asarray(x, np.float32).view(np.int32)
    magnitude = bits & 0x7FFFFFFF
    return np.where(magnitude > 0x7F800000, 0x7FFFFFFF, np.where(bits < 0, -magnitude, magnitude)).astype(np.int32)


def select_on_host(library, scores, starts, ends, top_k, capacity):
    """The selection of rows of scores, whose entries outside of their range are the largest of all."""
    rows, keys = scores.shape
    pitch = -(-keys // 4) * 4
    index = np.arange(pitch)
    ordered = np.full((rows, pitch), 0x7FFFFFFF, np.int32)
    ordered[:, :keys] = ordered_integers(scores)
    ordered[(index < starts[:, None]) | (index >= ends[:, None])] = 0x7FFFFFFF
    indices, selected = np.zeros((rows, top_k), np.int32), np.zeros((rows, top_k), np.float32)
    run(library.indexer_select, (ordered, starts, ends, indices, selected), rows, pitch, top_k, capacity)
    return indices, selected


def select_by_sorting(scores, starts, ends, top_k):
    """The same, by a stable sort of each row."""
    indices, selected = np.full((len(scores), top_k), -1), np.full((len(scores), top_k), -np.inf, np.float32)
    for row, (start, end) in enumerate(zip(starts, ends, strict=True)):
        order = start + np.argsort(-ordered_integers(scores[row, start:end]).astype(np.int64), kind="stable")[:top_k]
        indices[row, : len(order)], selected[row, : len(order)] = order, scores[row, order] + 0.0
    return indices, selected


def rows_of_scores(keys):
    """Rows of numbers that are normal, equal, few, ascending, descending, special, clustered, and misleading."""
    rng = np.random.default_rng(keys)
    normal = rng.normal(size=keys).astype(np.float32)
    special = normal.copy()
    special[::5], special[1::7], special[2::11], special[3::13] = np.inf, -np.inf, np.nan, -0.0
    few = rng.integers(-3, 4, keys).astype(np.float32)
    clustered = np.where(rng.random(keys) < 0.5, 1.0, 1e30).astype(np.float32) * (1 + normal * 1e-6)
    # Those that the threshold is guessed from are the largest, so that it is too high.
    misleading = normal.copy()
    sampled = np.arange(512) // 2 * (keys // 8) // 256 * 8 + np.arange(512) % 2 * 4
    misleading[(sampled[:, None] + np.arange(4)) % keys] += 10
    rows = [normal, np.ones_like(normal), few, np.sort(normal), -np.sort(normal), special, clustered, misleading]
    return np.stack(rows)


@pytest.mark.needs("g++")
@pytest.mark.parametrize(
    ("keys", "top_k"), [(70, 5), (70, 100), (5003, 64), (9001, 700), (9001, 2048), (9001, 2500), (2500, 1)]
)
def test_the_selection_is_that_of_a_stable_sort(library, keys, top_k):
    """With room for a tile and the selection, so that a row that is read by tiles is reduced after every tile."""
    scores = rows_of_scores(keys)
    starts = np.array([0, 3, 1, 0, 2, 0, 7, 0], np.int32)
    ends = np.array([keys, keys, keys - 1, keys, keys - 2, keys, keys - 5, keys], np.int32)
    got = select_on_host(library, scores, starts, ends, top_k, 2048 + top_k)
    want = select_by_sorting(scores, starts, ends, top_k)
    for x, y in zip(got, want, strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.needs("g++")
@pytest.mark.parametrize("keys", [140001, 600000])
def test_long_rows(library, keys):
    scores = np.random.default_rng(0).normal(size=(1, keys)).astype(np.float32)
    starts, ends = np.array([3], np.int32), np.array([keys], np.int32)
    got = select_on_host(library, scores, starts, ends, 50, 4096)
    for x, y in zip(got, select_by_sorting(scores, starts, ends, 50), strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.needs("g++")
def test_rows_without_keys_and_with_fewer(library):
    scores = rows_of_scores(300)[:4]
    starts, ends = np.array([5, 0, 299, 10], np.int32), np.array([5, 1, 300, 4], np.int32)
    got = select_on_host(library, scores, starts, ends, 6, 6144)
    for x, y in zip(got, select_by_sorting(scores, starts, np.maximum(starts, ends), 6), strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.fixture
def call_on_host(library, monkeypatch):
    """Lets the FFI calls run the kernels on the host."""

    def ffi_call(name, shapes, **options):
        def scores(query, key, weights, starts, ends, scales, *, split_keys, rectify):
            result = np.full(shapes.shape, 0x7FFFFFFF, np.int32)
            arrays = [np.array(x) for x in (query, key, weights, starts, ends)]
            sizes = (*query.shape[:3], key.shape[1], result.shape[2], split_keys, rectify)
            run(library.indexer_scores, (*arrays, np.array(scales) if scales.size else None, result), *sizes)
            return jnp.asarray(result)

        def select(scores, starts, ends):
            results = [np.zeros(x.shape, x.dtype) for x in shapes]
            top_k, arrays = results[0].shape[2], [np.array(x) for x in (scores, starts, ends)]
            run(library.indexer_select, (*arrays, *results), starts.size, scores.shape[2], top_k, 2048 + top_k)
            return [jnp.asarray(x) for x in results]

        return scores if name.endswith("scores") else select

    monkeypatch.setattr(forward, "register_handler", lambda name: name)
    monkeypatch.setattr(jax.ffi, "ffi_call", ffi_call)


def lowered(case):
    """The record of a conformance case, whose scores are exact."""
    return OP.lower(case.make(jax.random.key(0)))


CASES = {case.name: case for case in cases.cases()["lightning_indexer"]}


@pytest.mark.needs("g++")
@pytest.mark.parametrize("split_keys", [128, 256])
@pytest.mark.parametrize("name", CASES)
def test_indices_and_scores_match_the_reference(call_on_host, name, split_keys):
    record = lowered(CASES[name])
    got, _ = forward.forward(record, config.KeySplits(split_keys=split_keys))
    want, _ = reference(record)
    for x, y in zip(got, want, strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.needs("g++")
def test_chunks_of_queries_are_those_of_one(call_on_host, monkeypatch):
    """`lax.map` is a loop, since the kernels on the host need values."""
    record = lowered(CASES["equal scores in float8"])
    monkeypatch.setattr(forward, "queries_per_chunk", lambda record: 5)

    def loop(function, arrays):
        results = [function(type(arrays)(*(x[i] for x in arrays))) for i in range(len(arrays[0]))]
        return [jnp.stack(x) for x in zip(*results, strict=True)]

    monkeypatch.setattr(forward.lax, "map", loop)
    got, _ = forward.forward(record, config.KeySplits(split_keys=512))
    for x, y in zip(got, reference(record)[0], strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.needs("g++")
def test_nan_of_a_key_comes_first(call_on_host):
    record = lowered(CASES["64 heads in float8, scales of both signs"])
    key = record.key.at[:, 5::50, 3].set(jnp.nan)
    record = dataclasses.replace(record, key=key, key_ends=jnp.full_like(record.key_ends, 301))
    (indices, scores), _ = forward.forward(record, config.KeySplits(split_keys=512))
    np.testing.assert_array_equal(indices[..., :6], jnp.broadcast_to(jnp.arange(5, 301, 50), (*indices.shape[:2], 6)))
    np.testing.assert_array_equal(np.isnan(scores), jnp.broadcast_to(jnp.arange(9) < 6, scores.shape))


def test_other_dtypes_heads_and_chips_are_refused():
    record = jax.eval_shape(lambda: lowered(CASES["equal scores in float8"]))

    def reasons(device="NVIDIA H200", capability=9.0, **fields):
        gpu = DeviceInfo(platform="gpu", vendor="nvidia", kind=device, compute_capability=capability)
        with target_device(gpu):
            return list(IMPLEMENTATION.requires.extra(dataclasses.replace(record, **fields)))

    assert reasons() == []
    for fields, reason in (
        ({"key": jax.ShapeDtypeStruct((1, 301, 128), jnp.int8)}, "key: got dtype int8"),
        ({"query": jax.ShapeDtypeStruct((1, 13, 48, 128), E4M3)}, "got 48 heads"),
        ({"top_k": 5000}, "selects at most 4096"),
        ({"device": "NVIDIA B200", "capability": 10.0}, "compiled for 9.0 alone"),
    ):
        [found] = reasons(**fields)
        assert reason in found
