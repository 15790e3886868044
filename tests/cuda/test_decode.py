"""The split decoding kernels without a GPU: what is refused, how keys are split, and that the sources compile."""

import ctypes
import dataclasses
import functools
import os

import jax
import jax.numpy as jnp
import pytest

import ejkernel_cuda
from ejkernel import explain
from ejkernel.families.paged_attention import PagedAttention
from ejkernel.modules import ragged_decode_attention
from ejkernel.ops.device import DeviceInfo, target_device
from ejkernel_cuda import dense_decode, library
from ejkernel_cuda.dense_decode import config
from ejkernel_cuda.dense_decode.forward import forward

H200 = DeviceInfo(platform="gpu", vendor="nvidia", kind="NVIDIA H200", compute_capability=9.0)


def record(rows=64, keys=8192, heads=32, kv_heads=8, size=128, value_size=None, dtype=jnp.bfloat16, **fields):
    cache = jax.ShapeDtypeStruct((rows, keys, kv_heads, size), dtype)
    return PagedAttention(
        query=jax.ShapeDtypeStruct((rows, heads, size), dtype),
        key_pages=cache,
        value_pages=jax.ShapeDtypeStruct((*cache.shape[:3], value_size or size), dtype),
        block_tables=None,
        kv_lens=jax.ShapeDtypeStruct((rows,), jnp.int32),
        query_start=None,
        softmax_scale=0.1,
        kv_layout="pshd",
        kv_heads=None,
        **fields,
    )


def refusals(device=H200, dtype=jnp.bfloat16, size=64, keys=128, key_dtype=None, **options):
    """What the implementation has against a call."""
    query = jax.ShapeDtypeStruct((2, 8, size), dtype)
    cache = jax.ShapeDtypeStruct((2, keys, 2, size), key_dtype or dtype)
    ends = jax.ShapeDtypeStruct((2,), jnp.int32)
    with target_device(device):
        decision = explain(ragged_decode_attention, query, cache, cache, ends, ends, **options)
    [verdict] = [v for v in decision.forward.verdicts if v.implementation.name == "cuda"]
    return [reason for reason in verdict.reasons if library.COMPILED_MODULE not in reason]


def test_supported_calls_are_served():
    assert refusals(sliding_window=(9, None), logits_soft_cap=5.0) == []
    assert refusals(dtype=jnp.float16, size=40) == []


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"dtype": jnp.float32}, "dtype float32 is not among bfloat16, float16"),
        ({"size": 264}, "head size 264 is not in range(8, 257)"),
        ({"size": 60}, "query: got head dimension 60 and, of value, 60, the kernel reads multiples of 8"),
        ({"key_dtype": jnp.float32}, "key: got float32 and values of float32, the kernel reads the query's bfloat16"),
        ({"platform": "xla"}, "platform='xla' was asked for"),
        ({"device": DeviceInfo(platform="cpu")}, "needs nvidia, this is cpu"),
        (
            {"device": dataclasses.replace(H200, compute_capability=7.5)},
            "needs compute capability 8.0, this is 7.5",
        ),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_unsupported_calls_are_refused_with_the_argument_name(changes, sentence):
    assert refusals(**changes) == [sentence]


def test_an_installation_without_compiled_kernels_is_refused_with_that_reason(monkeypatch):
    monkeypatch.setattr(ejkernel_cuda, "__path__", [])
    library.register_handler.cache_clear()
    with pytest.raises(ModuleNotFoundError, match=r"ejkernel_cuda\.compiled_kernels: this installation"):
        library.register_handler("ejkernel_split_decode")


def test_a_paged_cache_is_refused():
    paged = record(kv_starts=None)
    tables = jax.ShapeDtypeStruct((64, 4), jnp.int32)
    [requires] = [i.requires for i in dense_decode.IMPLEMENTATIONS]
    assert not list(requires.extra(paged))
    assert list(requires.extra(dataclasses.replace(paged, block_tables=tables))) == [
        "block_tables: got a paged cache, the kernel reads a dense one with a row of keys for each query"
    ]


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ({}, 2),  # 512 blocks, and 264 that run at a time
        ({"keys": 2048}, 1),
        ({"rows": 1, "keys": 131072}, 32),
        ({"rows": 1, "keys": 300}, 1),
        ({"rows": 1, "keys": 131072, "sliding_window": (1023, None)}, 4),
        ({"rows": 16}, 2),
        ({"rows": 16, "keys": 32768}, 8),
    ],
    ids=str,
)
def test_splits_fill_the_chip(shape, expected):
    assert config.heuristic(record(**shape), H200, "forward") == config.DecodeSplits(num_splits=expected)


@pytest.mark.parametrize("rows", [1, 2, 3, 7, 33, 132, 300])
@pytest.mark.parametrize("capability", [8.0, 8.9, 9.0, 12.0, 7.5])
def test_number_of_splits_stays_between_1_and_the_limits(rows, capability):
    device = dataclasses.replace(H200, compute_capability=capability)
    for keys in (1, 255, 4096, 100_000):
        chosen = config.heuristic(record(rows=rows, keys=keys), device, "forward").num_splits
        assert 1 <= chosen <= max(1, min(config.MAX_SPLITS, keys // config.MIN_KEYS_PER_SPLIT))
        assert all(
            1 <= c.num_splits <= config.MAX_SPLITS for c in config.candidates(record(keys=keys), device, "forward")
        )


@pytest.mark.needs("cuda compiler")
@pytest.mark.slow
def test_sources_compile_and_the_call_lowers(compiled, monkeypatch):
    """On a machine without CUDA: the library loads, shows its handler, and JAX takes it for the CUDA platform."""
    handle = ctypes.CDLL(str(compiled / "compiled_kernels.so"), mode=os.RTLD_LOCAL)
    assert handle.ejkernel_split_decode
    monkeypatch.setattr(ejkernel_cuda, "__path__", [str(compiled)])
    library.register_handler.cache_clear()

    given = record(rows=4, keys=1024, softmax_aux=jax.ShapeDtypeStruct((32,), jnp.float32), sliding_window=(99, -2))
    call = functools.partial(forward, config=config.DecodeSplits(num_splits=3))
    text = jax.jit(call).trace(given).lower(lowering_platforms=("cuda",)).as_text()
    assert "@ejkernel_split_decode" in text
    assert "left = 99 : i32, right = -2 : i32" in text
    assert "tensor<3x4x32x128xf32>" in text

    batched = jax.tree.map(lambda x: jax.ShapeDtypeStruct((5, *x.shape), x.dtype), given)
    text = jax.jit(jax.vmap(call)).trace(batched).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("@ejkernel_split_decode") == 1
    assert "tensor<5x3x4x32x128xf32>" in text

    unchecked = [jax.export.DisabledSafetyCheck.custom_call("ejkernel_split_decode")]
    exported = jax.export.export(jax.jit(call), platforms=["cuda"], disabled_checks=unchecked)(given)
    assert exported.out_avals[0].shape == given.query.shape
