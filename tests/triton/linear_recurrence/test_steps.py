"""Recurrences token by token: numbers and bits in the interpreter, the instructions of different calls, dispatch."""

import re

import jax
import jax.numpy as jnp
import pytest
from triton_chips import CHIPS, H200, assert_conforms, assert_fits_and_spills_nothing, run_interpreted

from ejkernel.families.linear_recurrence import LinearRecurrence
from ejkernel.ops import dispatch
from ejkernel.ops.device import target_device
from ejkernel.ops.plugins import registry
from ejkernel_triton import ahead, launch
from ejkernel_triton.linear_recurrence.steps import config, forward

FLOAT_INSTRUCTION = re.compile(r"^\s*(?:@%p\d+ )?((?:fma|mul|add|sub|ex2|shfl|selp)\.[\w.]*[fb]32)\s+([^;]+);", re.M)


def test_values_in_packed_rows_and_slots():
    ops = ("gated_delta_rule", "rwkv7", "state_space_v2")
    assert_conforms(ops, "test_value and (packed or slots)", "triton_steps", serves_all=False)


def test_bits_of_the_suite():
    assert_conforms((), "test_batch_invariance", "triton_steps")


def test_values_with_harsh_gates_and_bits_of_chunks():
    assert "same" in run_interpreted("linear_recurrence/steps_process.py")


def record_of(*fields, rows=2, tokens=300, size=128, sequences=0, state=None, slots=0, transposed=False):
    """A call with the named fields."""
    heads = 16

    def array(*sizes, of=jnp.float32):
        return jax.ShapeDtypeStruct(sizes, of)

    query = array(rows, tokens, heads, size, of=jnp.bfloat16)
    arrays_of = {
        "gate": {"decay": array(rows, tokens, heads, 1)},
        "gates": {"decay": array(rows, tokens, heads, size)},
        "value gates": {"value_decay": array(rows, tokens, heads, size)},
        "beta": {"beta": array(rows, tokens, heads, of=jnp.bfloat16)},
        "dt": {"dt": array(rows, tokens, heads), "skip": array(1, 1, heads)},
        "segments": {"segment_ids": array(rows, tokens, of=jnp.int32)},
        "low rank": {"low_rank_write": query, "low_rank_read": query},
        "trees": {"parents": array(rows, tokens, of=jnp.int32)},
    }
    kwargs = {"query": query, "key": query, "value": query, "softmax_scale": 0.1, "transposed_states": transposed}
    kwargs |= {name: x for field in fields for name, x in arrays_of[field].items()}
    if state is not None:
        states = array(slots or sequences or rows, heads, size, size, of=state)
        kwargs["sequence_state" if sequences else "initial_state"] = states
    if sequences:
        kwargs["cu_seqlens"] = array(sequences + 1, of=jnp.int32)
    if slots:
        kwargs["state_slots"] = array(sequences, of=jnp.int32)
    return LinearRecurrence(**kwargs)


def launched(record, device=H200):
    """The launches of a call."""
    tile = config.batch_invariant(record, device, "forward")
    with target_device(device), launch.collect_launches() as calls:
        jax.eval_shape(lambda record: forward.forward(record, tile), record)
    return calls


@pytest.mark.parametrize(
    ("chip", "fields", "options"),
    [
        *((chip, ("gates", "value gates", "beta", "segments"), {}) for chip in CHIPS),
        ("sm_90", ("gates", "low rank", "segments"), {"size": 64}),
        ("sm_90", ("gate", "beta"), {"size": 256}),
        ("sm_80", ("gate", "dt"), {"rows": 1, "sequences": 5, "slots": 9, "state": jnp.bfloat16, "transposed": True}),
    ],
)
def test_the_kernel_fits_the_chip_and_spills_nothing(chip, fields, options):
    assert_fits_and_spills_nothing(launched(record_of(*fields, **options), CHIPS[chip]), chip)


def arithmetic(record):
    """The floating-point instructions of a call in order, with registers numbered as they appear."""
    (call,) = launched(record)
    names = {}

    def numbered(operand):
        return str(names.setdefault(operand, len(names))) if operand.startswith("%") else operand

    instructions = FLOAT_INSTRUCTION.findall(ahead.compile_for_chip(call, "sm_90").assembly)
    return [(name, *map(numbered, re.split(r"[,|\s]+", operands.strip()))) for name, operands in instructions]


@pytest.mark.parametrize("fields", [("gates",), ("gate", "beta"), ("gates", "low rank"), ("gate", "dt")])
def test_all_calls_run_the_same_arithmetic(fields):
    """What becomes one rounding, and in which order a sum adds, is the same for one token and many, in any batch."""
    long = arithmetic(record_of(*fields, rows=1, tokens=4096, size=64))
    assert len({x for x in long if x[0].startswith("fma")}) >= 64 // 8 * 4
    for options in (
        {"rows": 1, "tokens": 1},
        {"rows": 40, "tokens": 1, "state": jnp.float32},
        {"rows": 1, "tokens": 101, "sequences": 5, "slots": 9, "state": jnp.float32},
    ):
        assert arithmetic(record_of(*fields, size=64, **options)) == long, options


def test_copies_run_ahead_of_the_token():
    (call,) = launched(record_of("gate", "beta", rows=1))
    assembly = ahead.compile_for_chip(call, "sm_90").assembly
    waits = [int(n) for n in re.findall(r"cp\.async\.wait_group\s+(\w+)", assembly)]
    assert max(waits) >= 4 * 5, "the copies of four tokens, of five fields each, are in flight"


@pytest.mark.parametrize(("sequences", "slots"), [(0, 0), (3, 0), (3, 9)])
def test_states_are_updated_in_place(sequences, slots):
    rows = 1 if sequences else 2
    for state in (jnp.float32, None):
        record = record_of("gate", rows=rows, sequences=sequences, slots=slots if state else 0, state=state)
        (call,) = launched(record)
        (source,) = call.aliases
        assert call.outputs[call.aliases[source]] == call.inputs[source]
        assert call.inputs[source].shape[-3:] == (16, 128, 128)


def verdict(record, op="gated_linear_attention", *, invariant):
    chosen = dispatch.choose(registry().ops[op], record, H200, "auto", "forward", batch_invariant=invariant)
    return next(v for v in chosen.verdicts if v.implementation.name == "triton_steps")


def test_chunks_come_first_outside_of_a_batch_invariant_block():
    for invariant in (False, True):
        judged = verdict(record_of("gates"), invariant=invariant)
        assert not [x for x in judged.reasons if "jax_triton" not in x]
    implementation = judged.implementation
    assert implementation.priority_for(record_of("gates"), H200) < 0 < implementation.invariant_priority


def test_trees_and_slots_of_16_bits_are_refused_by_name():
    assert "parents is not handled" in verdict(record_of("gate", "trees"), invariant=False).reasons
    for state, refused in ((jnp.float32, False), (jnp.bfloat16, True)):
        record = record_of("gate", rows=1, sequences=3, slots=9, state=state)
        reasons = verdict(record, invariant=True).reasons
        assert any(x.startswith("batch_invariant: state_slots: slots of bfloat16") for x in reasons) == refused
