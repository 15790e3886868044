"""The CUDA decode step of linear recurrences on the host: its numbers, and what is refused."""

import ctypes
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.families.linear_recurrence import LinearRecurrence, num_state_heads, reference
from ejkernel.ops import dispatch
from ejkernel.ops.device import DeviceInfo, target_device
from ejkernel.ops.plugins import registry
from ejkernel_cuda import library, recurrent_step
from ejkernel_cuda.recurrent_step import cases

H200 = DeviceInfo(platform="gpu", vendor="nvidia", kind="NVIDIA H200", compute_capability=9.0)
REPLACED = {
    "extern __shared__ __align__(16) unsigned char memory[];": ("char* const memory = device::current->block->shared;"),
    "__grid_constant__": "",
}
CASES = {(op, case.name): case for op, found in cases.cases().items() for case in found}


@pytest.fixture(scope="module")
def host(compile_on_host):
    """The kernels' sources, compiled for the host with what stands in for CUDA."""
    return compile_on_host("recurrent_step", REPLACED, threads=128)


def called(function, arrays, sizes, *more):
    """Calls a function with arrays and integers."""
    function.restype = ctypes.c_char_p
    function.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, *(ctypes.c_float for _ in more)]
    pointers = (ctypes.c_void_p * len(arrays))(*(None if x is None else x.ctypes.data for x in arrays))
    num_bytes = (ctypes.c_int * len(arrays))(*(0 if x is None else x.nbytes for x in arrays))
    assert function(pointers, num_bytes, (ctypes.c_int * len(sizes))(*map(int, sizes)), *more) is None


def run(host, record):
    """Output and final states of a record."""
    packed, heads = record.cu_seqlens is not None, num_state_heads(record)
    (rows, tokens, query_heads, keys), columns = record.query.shape, record.value.shape[3]
    initial = record.sequence_state if packed else record.initial_state
    sequences = record.cu_seqlens.shape[0] - 1 if packed else 1
    shape = (keys, columns) if not record.transposed_states else (columns, keys)
    final = np.full((rows * sequences, heads, *shape), np.nan, np.float32) if initial is None else np.array(initial)
    output = np.full((rows, tokens, heads, columns), 0xFFFF, np.uint16)
    numbers, strides = (record.decay, record.beta, record.dt, record.skip), []
    for x in numbers:
        each = 0 if x is None else heads * (x.shape[3] if x.ndim == 4 else 1)
        long = (0, 0, 0) if x is None else (x.shape[1] * each, each, x.dtype == jnp.float32)
        strides += [long[0] if x is not None and x.shape[0] > 1 else 0, *long[1:]]
        strides[-2] = 0 if x is None or x.shape[1] == 1 else strides[-2]
    given = (record.query, record.key, record.value, *numbers, record.cu_seqlens, record.state_slots)
    arrays = [None if x is None else np.array(x) for x in given]
    arrays += [
        None if initial is None else final,
        final,
        output,
        None if record.parents is None else np.array(record.parents),
    ]
    channels = record.decay is not None and record.decay.shape[3] > 1
    sizes = [rows, tokens, sequences, heads, query_heads, record.key.shape[2], record.value.shape[2], columns]
    sizes += [final.shape[0], keys, channels, record.transposed_states, *strides]
    called(host.recurrent_step, arrays, sizes, record.softmax_scale)
    return np.asarray(output.view(jnp.bfloat16), np.float64), final


def widened(record):
    """The record with all numbers in float32."""
    given = {f.name: getattr(record, f.name) for f in dataclasses.fields(record)}
    is_float = {n: isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jnp.floating) for n, x in given.items()}
    return type(record)(**{n: x.astype(jnp.float32) if is_float[n] else x for n, x in given.items()})


def error(got, want):
    # Slots that no sequence uses hold inf.
    got, want = (np.where(np.isinf(x), 0, np.asarray(x, np.float64)) for x in (got, want))
    return np.linalg.norm(got - want) / np.linalg.norm(want)


@pytest.mark.needs("g++")
@pytest.mark.parametrize("name", [name for name in CASES if "no gates" not in name[1]], ids=lambda name: "-".join(name))
def test_outputs_and_states_match_the_reference(host, name):
    record = registry().ops[name[0]].lower(CASES[name].make(jax.random.key(7)))
    output, final = run(host, record)
    compare(output, final, reference(widened(record))[0])


def compare(output, final, expected):
    want, states = expected
    assert error(output, want) < 3e-3  # that of rounding to bfloat16
    assert error(final, states) < 1e-6
    assert not np.isnan(final).any()
    np.testing.assert_array_equal(np.isinf(final), np.isinf(states))


def test_conformance_cases_are_served():
    (step,) = recurrent_step.IMPLEMENTATIONS
    with target_device(H200):
        for (op, name), case in CASES.items():
            record = jax.eval_shape(
                lambda key, op=op, case=case: registry().ops[op].lower(case.make(key)), jax.random.key(0)
            )
            assert not list(step.requires.extra(record)), name


def verdict(tokens=8, size=128, columns=128, state=jnp.float32, packed=False, value=jnp.bfloat16, **fields):
    """What dispatch thinks of the step for a call."""
    rows, length, heads, array = (1 if packed else 64), (64 * tokens if packed else tokens), 16, jax.ShapeDtypeStruct
    query, shape = array((rows, length, heads, size), jnp.bfloat16), (64, heads, size, columns)
    given = {"beta": array((rows, length, heads), jnp.float32), "decay": array((1, 1, heads, size), jnp.float32)}
    fields = {name: given[name] for name in fields if name in given} | {
        name: x for name, x in fields.items() if name not in given
    }
    if packed:
        fields |= {"cu_seqlens": array((65,), jnp.int32), "sequence_state": array(shape, state)}
    else:
        fields |= {"initial_state": array(shape, state)}
    value = array((rows, length, heads, columns), value)
    record = LinearRecurrence(query=query, key=query, value=value, softmax_scale=0.1, **fields)
    with target_device(H200):
        decision = dispatch.choose(registry().ops["gated_delta_rule"], record, H200, "auto", "forward")
    (found,) = (v for v in decision.verdicts if v.implementation.name == "cuda")
    return found


def refusals(**changes):
    """What the step has against a call."""
    return [reason for reason in verdict(**changes).reasons if library.COMPILED_MODULE not in reason]


@pytest.mark.parametrize(
    ("changes", "first"),
    [({"tokens": 3}, False), ({"tokens": 4}, True), ({"tokens": 3, "decay": True}, False), ({"decay": True}, True)],
)
def test_priority_of_calls_with_few_tokens_is_below_triton(changes, first):
    assert refusals(**changes) == []
    assert (verdict(**changes).priority > 20) == first


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"tokens": 9}, "query: 9 tokens of 1 sequences; the decode step supports at most 8 tokens per sequence"),
        (
            {"packed": True, "tokens": 40},
            "query: one of 64 packed sequences may have 2497 tokens; the decode step supports at most 2049",
        ),
        ({"size": 96}, "query: got head dimension 96, the kernel wants one of 64, 128"),
        ({"columns": 48}, "value: got head dimension 48, the kernel wants a multiple of 32"),
        ({"columns": 64, "decay": True}, "value: got head dimension 64, the kernel wants a multiple of 128"),
        ({"state": jnp.bfloat16}, "initial_state: dtype bfloat16, wants float32"),
        (
            {"value": jnp.float32},
            "query: got other dtypes of key or value, wants one dtype instead of bfloat16, float32",
        ),
        (
            {"transposed_states": True, "beta": True},
            "initial_state: got transposed states, which the kernel does not read with beta or gates per key channel",
        ),
        (
            {"parents": jax.ShapeDtypeStruct((64, 8), jnp.int32)},
            "parents: got trees whose states are returned, the kernel returns their outputs alone",
        ),
        (
            {"parents": jax.ShapeDtypeStruct((64, 8), jnp.int32), "keeps_token_states": False, "decay": True},
            "parents: got gates per key channel, the kernel reads trees with gates per head",
        ),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_unsupported_calls_are_refused_with_the_argument_name(changes, sentence):
    assert sentence in refusals(**changes)


def test_supported_calls_are_served():
    assert refusals() == refusals(decay=True, beta=True) == refusals(packed=True, tokens=8) == []


def test_trees_whose_states_are_not_kept_take_the_kernel_first():
    changes = {"parents": jax.ShapeDtypeStruct((64, 3), jnp.int32), "keeps_token_states": False, "tokens": 3}
    assert refusals(**changes) == []
    assert verdict(**changes).priority > 20
