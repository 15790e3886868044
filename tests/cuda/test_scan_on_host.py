"""The CUDA kernels of the selective scan on the host: packed sequences, one of which holds NaN or infinities."""

import ctypes
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.families.selective_scan import SelectiveScan, packed_scan, reference
from ejkernel.families.selective_scan.scan_sequences import sequences
from ejkernel_cuda.selective_scan.backward import CHANNELS_PER_WARPGROUP
from ejkernel_cuda.selective_scan.forward import packed_sequence_operands, scan_operands

TOKENS, CHANNELS, SIZE = 150, 136, 13
BOUNDS = (2, 70, 70, 71, 139)
"""Tokens of no sequence at both ends, sequences of two intervals, one of none and one of a single token."""
POISONED = 2
SPARED = np.r_[2:70, 71:139]
BARRIER = 'asm volatile("bar.{0} %0, %1;" ::"r"(barrier), "r"(threads) : "memory");'
SHARED = "extern __shared__ __align__(128) unsigned char {0};"
EMULATED = "unsigned char* {0} = reinterpret_cast<unsigned char*>(device::current->block->shared);"
REPLACED = {
    BARRIER.format("sync"): "device::named_barrier(barrier, threads, true);",
    BARRIER.format("arrive"): "device::named_barrier(barrier, threads, false);",
    SHARED.format("shared[]"): EMULATED.format("shared"),
    SHARED.format("all_shared[]"): EMULATED.format("all_shared"),
}


@pytest.fixture(scope="module")
def host(compile_on_host):
    """The kernels' sources, compiled for the host with what stands in for CUDA."""
    return compile_on_host("selective_scan", REPLACED)


def called(function, arrays, numbers):
    """Calls a function with arrays and integers."""
    function.restype = ctypes.c_char_p
    pointers = (ctypes.c_void_p * len(arrays))(*(None if x is None else x.ctypes.data for x in arrays))
    integers = [
        (ctypes.c_int * len(n))(*map(int, n)) for n in (numbers, [0 if x is None else x.nbytes for x in arrays])
    ]
    assert function(pointers, *integers) is None


def nothing(*shape):
    """Memory that a kernel has to write."""
    return np.full(shape, np.nan, np.float32)


def inputs(record):
    """The arrays that both kernels take, and the integers."""
    operands = [np.array(x) for x in scan_operands(record, 16)]
    packing = [np.array(x) if x.size else None for x in packed_sequence_operands(record)]
    rows, packed = sequences(record), record.cu_seqlens is not None
    return operands, packing, [rows, TOKENS, CHANNELS, SIZE, rows], [rows if packed else 0]


def forward(host, record, lanes):
    """Output, states before intervals and final states."""
    operands, packing, sizes, packed = inputs(record)
    rows = record.x.shape[0]
    intervals = (
        packed_scan.max_num_intervals(TOKENS, sizes[0]) if packed[0] else -(-TOKENS // packed_scan.TOKENS_PER_INTERVAL)
    )
    initial = None if record.initial_state is None else np.array(record.initial_state)
    made = [nothing(*record.x.shape), nothing(rows, intervals, SIZE, CHANNELS), nothing(sizes[0], CHANNELS, SIZE)]
    called(host.selective_scan, [*operands, initial, *packing, *made], [*sizes, lanes, *packed])
    if record.cu_seqlens is not None:
        made[1] = np.array(packed_scan.zero_unused_states(record.cu_seqlens, made[1]))
    return made


def backward(host, record, states, cotangent, warpgroups):
    """Gradients by name."""
    operands, packing, sizes, packed = inputs(record)
    rows, wide = record.x.shape[0], -(-CHANNELS // CHANNELS_PER_WARPGROUP)
    given = [*operands, states, *(np.array(x) for x in cotangent), *packing]
    made = [nothing(*record.x.shape), nothing(*record.x.shape), nothing(rows, wide, TOKENS, 2, 16)]
    made += [nothing(sizes[0], CHANNELS, SIZE), nothing(sizes[0], CHANNELS), nothing(sizes[0], CHANNELS, SIZE)]
    called(host.selective_scan_gradient, [*given, *made], [*sizes, warpgroups, *packed])
    dx, dstep, partial, ddecay, dskip, dfirst = made
    pairs = partial.sum(axis=1)
    columns = {"write": pairs[:, :, 0, :SIZE], "read": pairs[:, :, 1, :SIZE]}
    return {"x": dx, "step": dstep, **columns, "decay": ddecay.sum(0), "skip": dskip.sum(0), "initial_state": dfirst}


def scan(packed):
    """A record in float32."""
    rows, keys = 1 if packed else 3, jax.random.split(jax.random.key(0), 6)
    token, column = (rows, TOKENS, CHANNELS), (rows, TOKENS, SIZE)
    return SelectiveScan(
        x=jax.random.normal(keys[0], token),
        step=jax.nn.softplus(jax.random.normal(keys[1], token) - 2),
        decay=-jnp.exp(jax.random.normal(keys[2], (CHANNELS, SIZE))),
        write=jax.random.normal(keys[3], column),
        read=jax.random.normal(keys[4], column),
        skip=jnp.ones(CHANNELS),
        initial_state=jax.random.normal(keys[5], (len(BOUNDS) - 1 if packed else rows, CHANNELS, SIZE)),
        cu_seqlens=jnp.array(BOUNDS) if packed else None,
    )


def poisoned(record, value):
    """The record with one sequence's tokens and state replaced, and the tokens of none."""
    others = np.setdiff1d(np.arange(TOKENS), SPARED)
    tokens = {name: getattr(record, name).at[:, others].set(value) for name in ("x", "step", "write", "read")}
    return dataclasses.replace(record, **tokens, initial_state=record.initial_state.at[POISONED].set(value))


@pytest.mark.needs("g++")
@pytest.mark.parametrize(("packed", "lanes"), [(True, 1), (True, 2), (False, 2)])
def test_outputs_and_states_match_the_reference(host, packed, lanes):
    record = scan(packed)
    (output, final), residuals = reference(record)
    for got, want in zip(forward(host, record, lanes), (output, residuals.states, final), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.needs("g++")
@pytest.mark.parametrize(("packed", "warpgroups"), [(True, 1), (True, 2), (False, 2)])
def test_gradients_match_the_reference(host, packed, warpgroups):
    record = scan(packed)
    (output, residuals), pull = jax.vjp(reference, record)
    cotangent = (jnp.cos(output[0]), jnp.sin(output[1]))
    (want,) = pull((cotangent, jax.tree.map(jnp.zeros_like, residuals)))
    for name, got in backward(host, record, np.array(residuals.states), cotangent, warpgroups).items():
        np.testing.assert_allclose(got, getattr(want, name), rtol=1e-3, atol=1e-3, err_msg=name)


@pytest.mark.needs("g++")
@pytest.mark.parametrize("value", [np.nan, np.inf, np.finfo(np.float32).max])
def test_values_of_a_packed_sequence_do_not_reach_another(host, value):
    record, spared = scan(packed=True), [n for n in range(len(BOUNDS) - 1) if n != POISONED]
    clean, dirty = (forward(host, x, 2) for x in (record, poisoned(record, value)))
    for part, at in ((0, np.s_[:, SPARED]), (2, spared)):
        assert dirty[part][at].tobytes() == clean[part][at].tobytes()
    assert not dirty[0][:, [0, 1, *range(139, TOKENS)]].any()
    cotangent = [np.cos(clean[0]), np.sin(clean[2])]
    bad = [x.copy() for x in cotangent]
    bad[0][:, np.setdiff1d(np.arange(TOKENS), SPARED)] = bad[1][POISONED] = value
    one = backward(host, record, clean[1], cotangent, 2)
    other = backward(host, poisoned(record, value), dirty[1], bad, 2)
    for name in ("x", "step", "write", "read"):
        assert other[name][:, SPARED].tobytes() == one[name][:, SPARED].tobytes(), name
        assert not other[name][:, [0, 1, *range(139, TOKENS)]].any(), name
    assert other["initial_state"][spared].tobytes() == one["initial_state"][spared].tobytes()
