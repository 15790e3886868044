"""The paged decoding kernels without a GPU: what is refused, how blocks are dealt, and how caches are described."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import pytest

import ejkernel_cuda
from ejkernel import explain
from ejkernel.families.paged_attention import PagedAttention
from ejkernel.modules import chunked_prefill_paged_decode, ragged_page_attention_v3, unified_attention
from ejkernel.ops.device import DeviceInfo, target_device
from ejkernel.ops.plugins import registry
from ejkernel_cuda import library
from ejkernel_cuda.paged_decode import IMPLEMENTATIONS, config
from ejkernel_cuda.paged_decode import forward as call
from ejkernel_cuda.paged_decode.forward import cache_strides, forward

H200 = DeviceInfo(platform="gpu", vendor="nvidia", kind="NVIDIA H200", compute_capability=9.0)
A100 = DeviceInfo(platform="gpu", vendor="nvidia", kind="NVIDIA A100", compute_capability=8.0)


def array(*shape, dtype=jnp.int32):
    return jax.ShapeDtypeStruct(shape, dtype)


def record(rows=64, heads=32, kv_heads=8, size=128, value_size=None, cache=jnp.float8_e4m3fn, **fields):
    pages = array(256, 64, kv_heads, size, dtype=cache)
    given = {
        "query": array(rows, heads, size, dtype=jnp.bfloat16),
        "key_pages": pages,
        "value_pages": array(*pages.shape[:3], value_size or size, dtype=cache),
        "block_tables": array(rows, 4),
        "kv_lens": array(rows),
        "query_start": None,
        "softmax_scale": 0.1,
        "kv_layout": "pshd",
        "kv_heads": None,
    }
    return PagedAttention(**{**given, **fields})


def reasons(**changes):
    (implementation,) = IMPLEMENTATIONS
    return list(implementation.requires.extra(record(**changes)))


def refusals(device=H200, rows=4, **options):
    """What the implementation has against a call of `unified_attention`."""
    cache = array(32, 16, 2, 128, dtype=jnp.float8_e4m3fn)
    query = array(rows, 8, 128, dtype=jnp.bfloat16)
    with target_device(device):
        decision = explain(unified_attention, query, cache, cache, array(4), array(4, 8), array(5), **options)
    [verdict] = [v for v in decision.forward.verdicts if v.implementation.name == "cuda_paged"]
    return [reason for reason in verdict.reasons if library.COMPILED_MODULE not in reason]


def test_supported_calls_are_served():
    assert refusals(sliding_window=9, logits_soft_cap=5.0, softmax_aux=array(8, dtype=jnp.float32)) == []
    assert refusals(causal=False, sliding_window=(9, 3), rows=3) == []
    for cache in (jnp.bfloat16, jnp.float8_e4m3fn, jnp.float8_e5m2, jnp.int8):
        assert reasons(cache=cache) == []


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"rows": 5}, "queries: got 5 rows of 4 sequences, the kernel serves at most one each"),
        ({"alibi_slopes": array(8, dtype=jnp.float32)}, "alibi_slopes is not handled"),
        ({"qq_bias": array(4, 4, dtype=jnp.float32)}, "qq_bias is not handled"),
        ({"shared_prefix": array()}, "shared_prefix is not handled"),
        ({"device": dataclasses.replace(H200, compute_capability=7.5)}, "needs compute capability 8.0, this is 7.5"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_unsupported_calls_are_refused_with_the_argument_name(changes, sentence):
    assert refusals(**changes) == [sentence]


def aligned(size, value_size, dtype):
    """The refusal of rows of the cache that copies cannot read."""
    rows = f"{size} and, of values, {value_size} elements of {dtype}"
    return f"key_cache: got rows of {rows}, the kernel reads multiples of 16 bytes"


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (
            {"cache": jnp.float16},
            "key_cache: got float16 and values of float16, the kernel reads the query's bfloat16 and dtypes of 8 bits",
        ),
        ({"size": 72}, aligned(72, 72, "float8_e4m3fn")),
        ({"size": 60, "cache": jnp.bfloat16}, aligned(60, 60, "bfloat16")),
        ({"value_size": 24}, aligned(128, 24, "float8_e4m3fn")),
        (
            {"key_pages": array(2**20, 64, 8, 128, dtype=jnp.float8_e4m3fn)},
            "key_cache: got 64 GiB or more of keys or of values, the kernel reads less",
        ),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_unsupported_records_are_refused_with_the_argument_name(changes, sentence):
    assert reasons(**changes) == [sentence]


@pytest.mark.parametrize(
    ("shape", "device", "expected"),
    [
        ({}, H200, (264, 8)),
        ({"heads": 256, "size": 64}, H200, (528, 16)),
        ({"heads": 200, "kv_heads": 200}, H200, (264, 20)),  # 200 lines would leave 64 blocks idle
        ({"kv_heads": 1}, H200, (264, 2)),
        ({}, A100, (108, 8)),  # 4 idle blocks are less than 5%
    ],
    ids=str,
)
def test_blocks_fill_the_chip(shape, device, expected):
    given = record(**shape)
    rule = config.heuristic(given, device, "forward")
    assert (rule.num_thread_blocks, rule.num_work_queues) == expected
    count, lines = config.thread_blocks_and_queues(given, rule)
    assert lines == rule.num_work_queues
    assert count % lines == 0
    assert count >= config.MIN_BUSY_BLOCK_FRACTION * rule.num_thread_blocks


def test_thread_blocks_and_queues_are_raised_and_lowered_to_fit_the_record():
    given = record(kv_heads=8)
    assert config.thread_blocks_and_queues(given, config.PagedDecodeGrid(num_thread_blocks=30, num_work_queues=5)) == (
        28,
        4,
    )
    assert config.thread_blocks_and_queues(given, config.PagedDecodeGrid(num_thread_blocks=1, num_work_queues=8)) == (
        8,
        8,
    )
    with pytest.raises(ValueError, match="of at least 1"):
        config.thread_blocks_and_queues(given, config.PagedDecodeGrid(num_thread_blocks=0, num_work_queues=1))
    rule = config.heuristic(given, H200, "forward")
    assert config.candidates(given, H200, "forward")[0] == rule


def test_calls_that_write_new_tokens_are_served_before_triton():
    tokens = array(4, 2, 128, dtype=jnp.bfloat16)
    cache = array(32, 16, 2, 128, dtype=jnp.bfloat16)
    query = array(4, 8, 128, dtype=jnp.bfloat16)
    with target_device(H200):
        call = (query, tokens, tokens, cache, cache, array(4), array(4, 8), array(5))
        verdicts = explain(chunked_prefill_paged_decode, *call).forward.verdicts
    found = {v.implementation.name: [r for r in v.reasons if library.COMPILED_MODULE not in r] for v in verdicts}
    names = list(found)
    assert found["cuda_paged"] == []
    assert names.index("cuda_paged") < names.index("triton")


def test_each_cache_layout_becomes_strides():
    assert cache_strides(record()) == (64 * 8 * 128, 8 * 128, 128, 64 * 8 * 128, 8 * 128, 128, 0)
    first = array(8, 256, 64, 128, dtype=jnp.int8)
    assert cache_strides(record(key_pages=first, value_pages=first, kv_layout="hpsd")) == (
        *(64 * 128, 128, 256 * 64 * 128) * 2,
        0,
    )
    combined = array(256, 64, 8, 2, 256, dtype=jnp.int8)
    assert cache_strides(record(key_pages=combined, value_pages=None, kv_layout="pshcd")) == (
        *(64 * 8 * 512, 8 * 512, 512) * 2,
        256,
    )


WRITING = {"ragged_page_attention_v3": (3,), "chunked_prefill_paged_decode": (3, 4)}
"""Operations that write new tokens, and the arguments that are the cache."""
WRITTEN = [(op, cache) for op in WRITING for cache in ("bfloat16", "float8_e4m3fn", "int8")][:-1]
"""With each dtype of the cache; `chunked_prefill_paged_decode` has no caches of whole numbers."""


def writing_call(op, cache, pages):
    """The operation on CUDA, and its arguments: four sequences of 128 slots in pages of 16."""
    tokens = array(4, 2, 128, dtype=cache)
    query, ints = array(4, 8, 128, dtype=jnp.bfloat16), (array(4), array(4, 8), array(5))
    if op == "ragged_page_attention_v3":
        pack = 4 // jnp.dtype(cache).itemsize
        combined = array(pages, 16, 4 // pack, pack, 128, dtype=cache)
        return ragged_page_attention_v3, (query, tokens, tokens, combined, *ints, array(3))
    caches = [array(pages, 16, 2, 128, dtype=cache)] * 2
    return chunked_prefill_paged_decode, (query, tokens, tokens, *caches, *ints)


@pytest.mark.parametrize(("op", "cache"), WRITTEN)
def test_the_custom_call_writes_new_tokens_into_the_donated_cache(op, cache, monkeypatch):
    monkeypatch.setattr(call, "register_handler", lambda symbol: symbol)
    _, arguments = writing_call(op, cache, 64)
    operation = registry().ops[op]

    def step(*arguments):
        args = operation.arguments(**dict(zip(operation.axes, arguments, strict=False)))
        record = operation.lower(args)
        assert list(IMPLEMENTATIONS[0].requires.extra(record)) == []
        return operation.finish(
            args, forward(record, config.PagedDecodeGrid(num_thread_blocks=16, num_work_queues=2))[0]
        )

    traced = jax.jit(step, donate_argnums=WRITING[op]).trace(*arguments)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    arrays = len(WRITING[op])
    assert text.count("@ejkernel_paged_decode(") == 1
    assert text.count("#stablehlo.output_operand_alias<") == arrays
    assert text.count("stablehlo.optimization_barrier") == 2, "XLA fuses what is not kept apart with slices"
    # Neither a scatter nor a copy beside it, nor a slice of the counts, which would be a launch of its own.
    assert "slice" not in text
    assert "stablehlo.scatter" not in text
    assert text.count("tf.aliasing_output") + text.count("jax.buffer_donor") >= arrays


@pytest.mark.needs("gpu")
@pytest.mark.parametrize(("op", "cache"), WRITTEN)
def test_donated_caches_are_updated_in_place_on_a_gpu(op, cache):
    function, arguments = writing_call(op, cache, 16384)
    donated = WRITING[op]
    made = [jnp.ones(x.shape, x.dtype) for x in arguments]
    made[-3 if "v3" in op else -2] = jnp.arange(32).reshape(4, 8)
    made[-2 if "v3" in op else -1] = jnp.arange(5)
    made[-4 if "v3" in op else -3] = jnp.full(4, 100)
    if "v3" in op:
        made[-1] = jnp.full(3, 4)
    compiled = jax.jit(functools.partial(function, platform="cuda"), donate_argnums=donated).lower(*made).compile()
    memory, size = compiled.memory_analysis(), sum(made[n].nbytes for n in donated)
    assert memory.alias_size_in_bytes == size
    assert memory.temp_size_in_bytes < size / 8
    for _ in range(2):
        pointers = [made[n].unsafe_buffer_pointer() for n in donated]
        _, *caches = compiled(*made)
        assert [x.unsafe_buffer_pointer() for x in caches] == pointers
        for n, x in zip(donated, caches, strict=True):
            made[n] = x


@pytest.mark.needs("gpu")
def test_layers_in_a_loop_share_one_cache_in_place_on_a_gpu():
    layers, pages = 4, 4096
    function, arguments = writing_call("ragged_page_attention_v3", "bfloat16", layers * pages)
    query, keys, values, cache, lengths, tables, *_ = (jnp.ones(x.shape, x.dtype) for x in arguments)

    def step(query, cache):
        def layer(cache, number):
            output, cache = function(
                query, keys, values, cache, 100 * lengths, places + number * pages, starts, made, platform="cuda"
            )
            return cache, output

        places, starts, made = jnp.arange(tables.size).reshape(tables.shape), jnp.arange(5), jnp.full(3, 4)
        return jax.lax.scan(layer, cache, jnp.arange(layers))

    memory = jax.jit(step, donate_argnums=1).lower(query, cache).compile().memory_analysis()
    assert memory.alias_size_in_bytes == cache.nbytes
    assert memory.temp_size_in_bytes < cache.nbytes / 8


@pytest.mark.needs("cuda compiler")
@pytest.mark.slow
def test_the_call_lowers(compiled, monkeypatch):
    monkeypatch.setattr(ejkernel_cuda, "__path__", [str(compiled)])
    library.register_handler.cache_clear()
    given = record(softmax_aux=array(32, dtype=jnp.float32), sliding_window=(99, None))
    call = functools.partial(forward, config=config.PagedDecodeGrid(num_thread_blocks=264, num_work_queues=8))
    text = jax.jit(call).trace(given).lower(lowering_platforms=("cuda",)).as_text()
    assert "@ejkernel_paged_decode" in text
    assert "left = 99 : i32, lines = 8 : i32" in text
    assert "tensor<528x16x128xf32>" in text
    written = dataclasses.replace(
        given, new_keys=array(64, 8, 128, dtype=jnp.bfloat16), new_values=array(64, 8, 128, dtype=jnp.bfloat16)
    )
    outputs = jax.eval_shape(call, written)[0]
    assert [x.shape for x in outputs] == [(64, 32, 128), (64, 32), given.key_pages.shape, given.key_pages.shape]
