"""The CUDA kernel of the chunked delta rule on the host: its numbers."""

import ctypes

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.families.linear_recurrence import LinearRecurrence, reference

REPLACED = {
    "extern __shared__ __align__(1024) char memory[];": "char* memory = device::current->block->shared;",
    'asm volatile("" : "+r"(warp), "+r"(lane), "+r"(t), "+r"(g));': "",
    'asm volatile("" : "+l"(at));': "",
}


@pytest.fixture(scope="module")
def host(compile_on_host):
    """The kernel's source, compiled for the host with what stands in for CUDA."""
    function = compile_on_host("delta_rule", REPLACED).delta_rule
    function.restype = ctypes.c_char_p
    function.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_float]
    return function


def make(gates, tokens, *, batch=1, heads=1, query_heads=None, key_heads=None, values=64, state=False):
    """A record in bfloat16, and float32 gates that are none, mild, strong, or -inf for some tokens."""
    keys = iter(jax.random.split(jax.random.key(tokens), 8))

    def normal(*shape):
        return jax.random.normal(next(keys), shape)

    query, key = normal(batch, tokens, query_heads or heads, 128), normal(batch, tokens, key_heads or heads, 128)
    key = key / jnp.linalg.norm(key, axis=-1, keepdims=True)
    value, beta = normal(batch, tokens, heads, values), jax.nn.sigmoid(normal(batch, tokens, heads))
    decay = None if gates == "none" else jax.nn.log_sigmoid(normal(batch, tokens, heads, 1))
    if gates == "mild":
        decay = decay / 16
    if gates == "-inf":
        decay = jnp.where(normal(*decay.shape) > 1.5, -jnp.inf, decay)
    query, key, value = (x.astype(jnp.bfloat16) for x in (query, key, value))
    initial = normal(batch, heads, 128, values) if state else None
    return LinearRecurrence(
        query=query, key=key, value=value, softmax_scale=0.1, decay=decay, beta=beta, initial_state=initial
    )


def run(host, record):
    """Output and final states of a record."""
    (batch, tokens, heads), values = record.beta.shape, record.value.shape[3]
    output = np.full((batch, tokens, heads, values), 0xFFFF, np.uint16)
    final = np.full((batch, heads, 128, values), np.nan, np.float32)
    operands = (record.query, record.key, record.value, record.decay, record.beta, record.initial_state)
    arrays = [None if x is None else np.array(x) for x in operands] + [output, final]
    pointers = (ctypes.c_void_p * len(arrays))(*(None if x is None else x.ctypes.data for x in arrays))
    sizes = (batch, tokens, heads, *(x.shape[2] for x in (record.query, record.key, record.value)), values)
    assert host(pointers, (ctypes.c_int * len(sizes))(*sizes), record.softmax_scale) is None
    return np.asarray(output.view(jnp.bfloat16), np.float64), final


def error(got, want):
    want = np.asarray(want, np.float64)
    return np.linalg.norm(got - want) / np.linalg.norm(want)


@pytest.mark.needs("g++")
@pytest.mark.parametrize(
    ("gates", "tokens", "options"),
    [
        ("none", 64, {}),
        ("mild", 300, {"state": True}),
        ("strong", 130, {"batch": 2, "heads": 2, "query_heads": 1, "key_heads": 1, "values": 128}),
        ("-inf", 65, {"heads": 2, "key_heads": 1, "state": True}),
    ],
)
def test_numbers(host, gates, tokens, options):
    record = make(gates, tokens, **options)
    output, state = run(host, record)
    want_output, want_state = reference(record)[0]
    assert error(output, want_output) < 8e-3
    assert error(state, want_state) < 8e-3
