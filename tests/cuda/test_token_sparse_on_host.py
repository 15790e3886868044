"""The CUDA kernel of latent attention to listed keys on the host: its numbers, what is refused, and its splits."""

import ctypes
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.families.token_sparse_attention import TokenSparseAttention, reference
from ejkernel.ops.device import DeviceInfo, target_device
from ejkernel_cuda.token_sparse_attention import IMPLEMENTATIONS, forward
from ejkernel_cuda.token_sparse_attention.config import LatentSplits, heuristic

[LATENT] = IMPLEMENTATIONS
H200 = DeviceInfo(platform="gpu", vendor="nvidia", kind="NVIDIA H200", compute_capability=9.0)
B200 = DeviceInfo(platform="gpu", vendor="nvidia", kind="NVIDIA B200", compute_capability=10.0)
REPLACED = {
    "extern __shared__ __align__(1024) char memory[];": "char* memory = device::current->block->shared;",
    'asm volatile("" : "+r"(opaque_row));': "",
}
HOST_DTYPES = {"bfloat16": np.uint16, "float32": np.float32}


@pytest.fixture(scope="module")
def kernel(compile_on_host):
    """The kernel's source, compiled for the host with what stands in for CUDA."""
    function = compile_on_host("token_sparse_attention", REPLACED).latent_sparse
    function.restype = ctypes.c_char_p
    function.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_float]
    return function


@pytest.fixture
def call_on_host(kernel, monkeypatch):
    """Lets the FFI call run the kernel on the host."""

    def ffi_call(name, shapes, **options):
        def call(query, key, indices, sinks, *, splits, score_factor):
            results = [np.full(x.shape, -1).astype(HOST_DTYPES[x.dtype.name]) for x in shapes]
            arrays = [np.array(x) for x in (query, key, indices, sinks)] + results
            pointers = (ctypes.c_void_p * len(arrays))(*(x.ctypes.data if x.size else None for x in arrays))
            sizes = (*query.shape[:3], key.shape[1], indices.shape[3], splits)
            assert kernel(pointers, (ctypes.c_int * len(sizes))(*sizes), score_factor) is None
            return [x.view(jnp.bfloat16) if x.dtype == np.uint16 else x for x in results]

        return call

    monkeypatch.setattr(forward, "register_handler", lambda name: name)
    monkeypatch.setattr(jax.ffi, "ffi_call", ffi_call)


def make(*, batch=1, tokens=1, heads=3, listed=140, lengths=None, sinks=False, scale=0.06):
    """A record of 40 keys, of which the odd ones are NaN and not listed, as every fifth entry lists none."""
    keys = jax.random.split(jax.random.key(listed), 4)
    query = jax.random.normal(keys[0], (batch, tokens, heads, 576), jnp.bfloat16)
    key = jax.random.normal(keys[1], (batch, 40, 1, 576), jnp.bfloat16)
    entries = jnp.arange(listed)
    indices = jnp.where(entries % 5 == 4, -1, 2 * jax.random.randint(keys[2], (batch, tokens, 1, listed), 0, 20))
    if lengths is not None:
        indices = jnp.where(entries < jnp.array(lengths)[:, None, None], indices, -1)
    return TokenSparseAttention(
        query=query,
        key=jnp.where((jnp.arange(40) % 2 == 1)[:, None, None], jnp.nan, key).astype(jnp.bfloat16),
        indices=indices,
        softmax_scale=scale,
        value_size=512,
        softmax_aux=jax.random.normal(keys[3], (heads,)) if sinks else None,
    )


RECORDS = {
    "two steps, two tiles of heads": make(heads=70),
    "lists of all lengths, sinks": make(tokens=4, lengths=(0, 1, 65, 140), sinks=True),
    "batch, negative scale": make(batch=2, tokens=2, listed=50, scale=-0.04),
    "scale of 0": make(listed=30, scale=0.0),
}


@pytest.mark.needs("g++")
@pytest.mark.parametrize("splits", [1, 2])
@pytest.mark.parametrize("name", RECORDS)
def test_output_and_lse_match_the_reference(call_on_host, name, splits):
    record = RECORDS[name]
    output, residuals = forward.forward(record, LatentSplits(splits=splits))
    widened = {x: getattr(record, x).astype(jnp.float32) for x in ("query", "key")}
    want, want_residuals = reference(dataclasses.replace(record, **widened))
    assert jnp.linalg.norm(output.astype(jnp.float32) - want) < 4e-3 * jnp.linalg.norm(want)
    np.testing.assert_allclose(residuals.lse, want_residuals.lse, rtol=1e-5, atol=1e-5)


def test_other_rows_heads_and_chips_are_refused():
    record = jax.eval_shape(make)

    def reasons(device=H200, **fields):
        with target_device(device):
            return list(LATENT.requires.extra(dataclasses.replace(record, **fields)))

    assert reasons() == []
    for fields, reason in (
        ({"value_size": 256}, "values 256"),
        ({"key": jax.ShapeDtypeStruct((1, 40, 3, 576), jnp.bfloat16)}, "got 3 heads"),
        ({"device": B200}, "compiled for 9.0 alone"),
    ):
        [found] = reasons(**fields)
        assert reason in found


@pytest.mark.parametrize(("tokens", "heads", "splits"), [(64, 128, 1), (64, 16, 2), (1, 16, 8), (4096, 128, 1)])
def test_lists_of_few_queries_are_split_over_the_chip(tokens, heads, splits):
    record = jax.eval_shape(lambda: make(tokens=tokens, heads=heads, listed=2048))
    assert heuristic(record, H200, "forward") == LatentSplits(splits=splits)
