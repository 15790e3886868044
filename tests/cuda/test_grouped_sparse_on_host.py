"""The CUDA kernels of grouped attention to listed keys on the host: their numbers, shared lists, refusals."""

import ctypes
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.families.token_sparse_attention import TokenSparseAttention, reference
from ejkernel.ops.device import DeviceInfo, target_device
from ejkernel_cuda.grouped_sparse_attention import IMPLEMENTATIONS
from ejkernel_cuda.grouped_sparse_attention import forward as grouped

[GROUPED] = IMPLEMENTATIONS
H200 = DeviceInfo(platform="gpu", vendor="nvidia", kind="NVIDIA H200", compute_capability=9.0)
B200 = DeviceInfo(platform="gpu", vendor="nvidia", kind="NVIDIA B200", compute_capability=10.0)
REPLACED = {
    "extern __shared__ __align__(1024) char memory[];": "char* memory = device::current->block->shared;",
    'asm volatile("" : "+f"(scores[j / 4][j % 4]));': ";",
}
HOST_DTYPES = {"bfloat16": np.uint16, "float32": np.float32, "int32": np.int32}


@pytest.fixture(scope="module")
def kernel(compile_on_host):
    """The kernels' sources, compiled for the host with what stands in for CUDA."""
    function = compile_on_host("grouped_sparse_attention", REPLACED).grouped_sparse
    function.restype = ctypes.c_char_p
    function.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_float]
    return function


@pytest.fixture
def call_on_host(kernel, monkeypatch):
    """Lets the FFI call run the kernels on the host, with bits of a number of keys at a time; what they passed on."""
    passed_on = {}

    def ffi_call(name, shapes, *, window, **options):
        def call(query, key, value, indices, sinks, *, score_factor):
            results = [np.full(x.shape, -1).astype(HOST_DTYPES[x.dtype.name]) for x in shapes]
            arrays = [np.array(x) for x in (query, key, value, indices, sinks)] + results
            pointers = (ctypes.c_void_p * len(arrays))(*(x.ctypes.data if x.size else None for x in arrays))
            sizes = (*query.shape[:3], *key.shape[1:3], *indices.shape[2:], shapes[2].shape[3], window)
            assert kernel(pointers, (ctypes.c_int * len(sizes))(*sizes), score_factor) is None
            passed_on.update(zip(("entries", "tiles", "not_finite"), results[2:], strict=False))
            return [x.view(jnp.bfloat16) if x.dtype == np.uint16 else x for x in results]

        return call

    def use(window):
        monkeypatch.setattr(grouped, "register_handler", lambda name: name)
        monkeypatch.setattr(jax.ffi, "ffi_call", functools.partial(ffi_call, window=window))
        return passed_on

    return use


def make(*, batch=1, tokens=9, heads=16, kv_heads=1, lists=1, listed=40, keys=100, empty=(), sinks=False, scale=0.09):
    """A record whose odd keys and values are NaN and not listed, as every fifth entry lists none."""
    seeds = jax.random.split(jax.random.key(listed), 5)
    odd = (jnp.arange(keys) % 2 == 1)[:, None, None]
    key, value = (
        jnp.where(odd, jnp.nan, jax.random.normal(x, (batch, keys, kv_heads, 128))).astype(jnp.bfloat16)
        for x in seeds[:2]
    )
    indices = 2 * jax.random.randint(seeds[2], (batch, tokens, lists, listed), 0, keys // 2)
    is_empty = (jnp.arange(listed) % 5 == 4) | jnp.isin(jnp.arange(tokens), jnp.array(empty, int))[:, None, None]
    return TokenSparseAttention(
        query=jax.random.normal(seeds[3], (batch, tokens, heads, 128), jnp.bfloat16),
        key=key,
        value=value,
        indices=jnp.where(is_empty, jnp.where(jnp.arange(listed) % 2, -1, keys), indices),
        softmax_scale=scale,
        value_size=128,
        softmax_aux=jax.random.normal(seeds[4], (heads,)) if sinks else None,
    )


def check(record):
    output, residuals = grouped.forward(record, None)
    fields = {x: getattr(record, x).astype(jnp.float32) for x in ("query", "key", "value")}
    fields["indices"] = jnp.where(record.indices < record.key.shape[1], record.indices, -1)
    want, want_residuals = reference(dataclasses.replace(record, **fields))
    assert jnp.linalg.norm(output.astype(jnp.float32) - want) <= 5e-3 * jnp.linalg.norm(want)
    np.testing.assert_allclose(residuals.lse, want_residuals.lse, rtol=1e-5, atol=1e-5)


RECORDS = {
    "keys listed again, an empty list, sinks": (make(keys=30, empty=(2,), sinks=True), 32),
    "lists by KV head, few heads, negative scale": (make(heads=10, kv_heads=2, lists=2, scale=-0.07), 128),
    "batch, one list for KV heads": (make(batch=2, tokens=3, heads=32, kv_heads=2, listed=90, keys=600), 608),
    "many tiles": (make(tokens=8, listed=180, keys=1300), 320),
    "no key at all": (make(tokens=2, empty=(0, 1)), 128),
    "tiles of one half, more than the ring has": (make(tokens=8, listed=160, keys=1500, empty=(4, 5, 6)), 1504),
}


@pytest.mark.needs("g++")
@pytest.mark.parametrize("name", RECORDS)
def test_output_and_lse_match_the_reference(call_on_host, name):
    record, window = RECORDS[name]
    call_on_host(window)
    check(record)


@pytest.mark.needs("g++")
def test_values_of_neighbours_that_are_not_finite_stay_out(call_on_host):
    record = make(tokens=11, listed=20, keys=80)
    # Query 3 lists an infinite value; its group is computed again, and others than query 3 are as before.
    bad = int(record.indices[0, 3, 0, 0])
    indices = jnp.where((record.indices == bad) & (jnp.arange(11) != 3)[:, None, None], -1, record.indices)
    record = dataclasses.replace(record, indices=indices)
    passed_on = call_on_host(96)
    finite, _ = grouped.forward(record, None)
    found, _ = grouped.forward(dataclasses.replace(record, value=record.value.at[0, bad].set(jnp.inf)), None)
    assert passed_on["not_finite"].tolist() == [[[1, 0]]]
    others = jnp.arange(11) != 3
    np.testing.assert_allclose(found[0, others].astype(float), finite[0, others].astype(float), rtol=0.02, atol=0.02)
    assert jnp.isinf(found[0, 3].astype(jnp.float32)).all()


@pytest.mark.needs("g++")
def test_lists_of_a_group_have_each_key_once_with_its_queries(call_on_host):
    record = make(tokens=8, listed=100, keys=900)
    passed_on = call_on_host(256)
    grouped.forward(record, None)
    [[[tiles]]], [[[count]]] = passed_on["entries"], passed_on["tiles"]
    found = tiles[:count].reshape(-1).view(np.uint32)
    want = np.zeros((900, 8), int)
    for query, keys in enumerate(np.array(record.indices)[0, :, 0]):
        np.add.at(want[:, query], keys[(keys >= 0) & (keys < 900)], 1)
    listed = np.zeros_like(want)
    for entry in found:
        listed[entry & 0xFFFFFF] += (entry >> 24 >> np.arange(8)) & 1
    np.testing.assert_array_equal(listed, want)
    assert (want > 1).any()
    assert count <= -(-np.minimum(want, 1).any(1).sum() // 64) + 3 + (want > 1).any(0).sum()


def test_other_rows_heads_and_chips_are_refused():
    record = jax.eval_shape(make)

    def reasons(device=H200, **fields):
        with target_device(device):
            return list(GROUPED.requires.extra(dataclasses.replace(record, **fields)))

    assert reasons() == []
    for fields, reason in (
        ({"value": None}, "got None"),
        ({"value_size": 64}, "values 64"),
        ({"query": jax.ShapeDtypeStruct((1, 9, 24, 128), jnp.bfloat16)}, "have 24 heads"),
        ({"key": jax.ShapeDtypeStruct((1, 2**25, 1, 128), jnp.bfloat16)}, f"got {2**25} keys"),
        ({"device": B200}, "compiled for 9.0 alone"),
    ):
        [found] = reasons(**fields)
        assert reason in found


@pytest.mark.parametrize(
    ("shape", "priority"),
    [((1, 4096, 64, 128), 20), ((1, 64, 64, 128), -1), ((1, 4096, 32, 128), -1), ((64, 1, 64, 128), -1)],
)
def test_groups_that_fill_the_chip_come_before_triton(shape, priority):
    fields = {"query": shape, "key": (shape[0], 32768, 4, 128), "value": (shape[0], 32768, 4, 128)}
    record = jax.eval_shape(make)
    record = dataclasses.replace(record, **{n: jax.ShapeDtypeStruct(x, jnp.bfloat16) for n, x in fields.items()})
    assert GROUPED.priority(record, H200, "forward") == priority
