"""Recurrences with a low-rank term in Triton: numbers in the interpreter, dispatch, and what they take of a chip."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from triton_chips import CHIPS, H200, assert_conforms, assert_fits, on_chips, run_interpreted

from ejkernel.families.linear_recurrence import LinearRecurrence
from ejkernel.ops.device import target_device
from ejkernel.types.pullback import Pullback
from ejkernel_triton import launch
from ejkernel_triton.linear_recurrence import low_rank
from ejkernel_triton.linear_recurrence.low_rank.backward import backward
from ejkernel_triton.linear_recurrence.low_rank.config import LowRankConfig, heuristic

FIELDS = ("query", "key", "value", "decay", "low_rank_write", "low_rank_read")
(IMPLEMENTATION,) = low_rank.implementations()


def record_of(tokens, dtype=jnp.bfloat16, size=64):
    """A call with 16 heads."""
    vector = jax.ShapeDtypeStruct((4, tokens, 16, size), dtype)
    decay = jax.ShapeDtypeStruct(vector.shape, jnp.float32)
    vectors = dict.fromkeys(("query", "key", "value", "low_rank_write", "low_rank_read"), vector)
    return LinearRecurrence(softmax_scale=1.0, decay=decay, **vectors)


def test_a_call_of_one_token_goes_to_xla_first():
    assert IMPLEMENTATION.priority_for(record_of(1), H200) < 0 < IMPLEMENTATION.priority_for(record_of(2), H200)


@pytest.mark.parametrize(
    ("fields", "refusal"),
    [
        ({"low_rank_write": None, "low_rank_read": None}, "low_rank_read: got None"),
        ({"decay": None}, "decay: got None, wants a gate per key channel, 64 per head"),
        ({"decay": jax.ShapeDtypeStruct((4, 32, 16, 1), jnp.float32)}, "decay: got 1 per head"),
    ],
)
def test_records_of_other_recurrences_are_refused(fields, refusal):
    record = dataclasses.replace(record_of(32), **fields)
    assert any(refusal in reason for reason in IMPLEMENTATION.requires.extra(record))
    assert not list(IMPLEMENTATION.requires.extra(record_of(32)))


def test_a_chunk_that_is_no_power_of_two_is_an_error():
    chosen = dataclasses.asdict(heuristic(record_of(32), H200, "forward"))
    with pytest.raises(ValueError, match="chunk: got 48, wants a power of two from 16 on"):
        LowRankConfig(**{**chosen, "chunk": 48})


def test_conformance():
    assert_conforms(("rwkv7_mul",), "test_gradients and packed", "triton_low_rank", serves_all=False)


def test_gates_of_any_strength_are_exact():
    assert "same" in run_interpreted("linear_recurrence/low_rank_gates_process.py")


@pytest.mark.parametrize(("dtype", "chip"), on_chips(["bfloat16", "float32"]))
def test_both_passes_fit_the_chip(dtype, chip):
    record, device = record_of(4096, jnp.dtype(dtype)), CHIPS[chip]
    chosen = heuristic(record, device, "forward")
    state = jax.ShapeDtypeStruct((4, 16, 64, 64), jnp.float32)
    pullback = Pullback(
        record=record, residuals=(), output=None, cotangent=(record.value, state), grad_fields=frozenset(FIELDS)
    )
    with target_device(device), launch.collect_launches() as calls:
        jax.eval_shape(lambda pullback: backward(pullback, chosen), pullback)
    assert [call.kernel.__name__ for call in calls] == [
        "chunk_transitions_kernel",
        "transition_scan_kernel",
        "transition_scan_bwd_kernel",
        "chunk_bwd_dvy_kernel",
        "chunk_bwd_dka_kernel",
        "chunk_bwd_dqb_kernel",
    ]
    assert_fits(calls, chip)
