"""The CUDA kernels of decoding over codes on the host: each format, over several blocks, with all terms."""

import ctypes
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.families.paged_attention import reference
from ejkernel.modules.operations.cases.paged_turboquant import TurboQuantSizes, v2_inputs
from ejkernel.ops.plugins import registry
from ejkernel_cuda.paged_codes import FORMATS, forward
from ejkernel_cuda.paged_decode.config import PagedDecodeGrid

SIZES = TurboQuantSizes(kv_lens=(500, 7, 20), q_lens=(1, 1, 1), h=8, g=2, d=128, v=128, s=16, dtype=jnp.bfloat16)
REPLACED = {
    "extern __shared__ __align__(128) unsigned char shared[];": (
        "unsigned char* const shared = reinterpret_cast<unsigned char*>(device::current->block->shared);"
    ),
    'asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(flag), "l"(ticket) : "memory");': "*flag = ticket;",
    'asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(flag_value) : "l"(flag) : "memory");': (
        "flag_value = *flag; device::yield();"
    ),
    'asm volatile("prefetch.global.L2 [%0];" ::"l"(call.tables + entry));': "",
}
HOST_DTYPES = {"bfloat16": np.uint16}


@pytest.fixture(scope="module")
def kernel(compile_on_host):
    """The kernels' source, compiled for the host with what stands in for CUDA."""
    function = compile_on_host("paged_decode", REPLACED, threads=384).paged_codes
    function.restype = ctypes.c_char_p
    function.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p]
    return function


@pytest.fixture
def call_on_host(kernel, monkeypatch):
    """Lets the FFI call run the kernel on the host."""

    def ffi_call(name, shapes, **options):
        def call(*operands, key_bits, value_bits, lines, scale, cap, value_scale, **scalars):
            results = [np.full(x.shape, -1).astype(HOST_DTYPES.get(x.dtype.name, x.dtype)) for x in shapes]
            arrays = [np.array(x) for x in operands] + results
            query, tables, lengths, query_map = (operands[n] for n in (0, 3, 4, 14))
            sequences = lengths.size
            sizes = (
                *(query.shape[0], query.shape[1], query_map.shape[0] - 128, scalars["kv_heads"], sequences),
                *(tables.size // sequences, scalars["pages"], scalars["page_size"], lines),
                *(scalars["left"], scalars["right"], key_bits, value_bits, operands[12].size, operands[13].size),
                results[4].size // 4,
            )
            pointers = (ctypes.c_void_p * len(arrays))(*(x.ctypes.data if x.size else None for x in arrays))
            factors = (ctypes.c_float * 3)(scale, cap, value_scale)
            assert kernel(pointers, (ctypes.c_int * len(sizes))(*sizes), factors) is None
            return [x.view(jnp.bfloat16) if x.dtype == np.uint16 else x for x in results]

        return call

    monkeypatch.setattr(forward, "register_handler", lambda name: name)
    monkeypatch.setattr(jax.ffi, "ffi_call", ffi_call)


def make_record(sizes, **options):
    """Returns the record of a call with normal keys and values, whose last sequence is padding."""
    operation = registry().ops["ragged_page_attention_v2_turboquant"]
    return operation.lower(operation.arguments(**v2_inputs(jax.random.key(0), sizes), return_lse=True, **options))


def check(record, **grid):
    output, lse = forward.forward(record, PagedDecodeGrid(**grid))[0][:2]
    widened = {name: getattr(record, name).astype(jnp.float32) for name in ("query", "key_norms", "value_norms")}
    want, want_lse = reference(dataclasses.replace(record, **widened))[0][:2]
    assert jnp.linalg.norm(output.astype(jnp.float32) - want) < 8e-3 * jnp.linalg.norm(want)
    np.testing.assert_allclose(lse, want_lse, rtol=2e-3, atol=5e-3)


@pytest.mark.needs("g++")
@pytest.mark.parametrize("bits", FORMATS, ids=lambda bits: "-".join(map(str, bits)))
def test_output_and_lse_of_each_format_match_the_reference(call_on_host, bits):
    _, signs, key_bits, value_bits = bits
    sizes = dataclasses.replace(SIZES, key_bits=key_bits, value_bits=value_bits, projections=signs)
    check(make_record(sizes), num_thread_blocks=3, num_work_queues=1)


TERMS = {
    "nine heads each, two queues": ({"h": 18, "key_bits": 3, "value_bits": 3}, {"num_work_queues": 2}),
    "signs, pages that do not divide tiles": ({"key_bits": 4, "value_bits": 4, "projections": 128, "s": 24}, {}),
    "keys of 1 bit, long context over blocks": (
        {"key_bits": 1, "value_bits": 2, "projections": 128, "kv_lens": (900, 1, 3)},
        {"num_thread_blocks": 6},
    ),
}


@pytest.mark.needs("g++")
@pytest.mark.parametrize("name", TERMS)
def test_terms_and_shapes_match_the_reference(call_on_host, name):
    changes, grid = TERMS[name]
    sizes = dataclasses.replace(SIZES, **{"projections": 0, **changes})
    sinks = jax.random.normal(jax.random.key(1), (sizes.h,), jnp.float32)
    record = make_record(sizes, sliding_window=270, logits_soft_cap=1.5, softmax_aux=sinks)
    # A codebook of fewer levels: codes past it stand for its last one.
    record = dataclasses.replace(record, value_codebook=jnp.linspace(-0.2, 0.3, 3))
    check(record, **{"num_thread_blocks": 4, "num_work_queues": 1, **grid})
