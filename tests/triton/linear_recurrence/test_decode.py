"""The decode step of linear recurrences: its numbers in the interpreter, and what its kernel takes of a chip."""

import jax
import jax.numpy as jnp
import pytest
from triton_chips import CHIPS, H200, assert_conforms, assert_fits_and_spills_nothing

from ejkernel.families.linear_recurrence import LinearRecurrence
from ejkernel.ops import dispatch
from ejkernel.ops.device import target_device
from ejkernel.ops.plugins import registry
from ejkernel_triton import ahead, launch
from ejkernel_triton.linear_recurrence.decode import config as decode_config
from ejkernel_triton.linear_recurrence.decode import forward as decode_forward

# A state that all of a batch share must not be written over.
VALUES = "test_value and not eager and not shapes and (step or packed or mixed or gates or slots or one_token or trees)"
TESTS = f"({VALUES}) or (test_vmap_shared and gated_delta_rule and step)"


def test_conformance():
    assert_conforms((), TESTS, "triton_decode", serves_all=False)


def record_of(*fields, tokens=8, size=128, packed=False, state=jnp.float32, slots=0, transposed=False):
    """A step of 64 sequences with the named fields."""
    sequences, heads = 64, 16
    rows, length = (1, sequences * tokens) if packed else (sequences, tokens)

    def array(*sizes, of=jnp.float32):
        return jax.ShapeDtypeStruct(sizes, of)

    query = array(rows, length, heads, size, of=jnp.bfloat16)
    given = {
        "gate": {"decay": array(rows, length, heads, 1)},
        "gates": {"decay": array(rows, length, heads, size)},
        "value gates": {"value_decay": array(rows, length, heads, size)},
        "beta": {"beta": array(rows, length, heads)},
        "dt": {"dt": array(rows, length, heads), "skip": array(1, 1, heads)},
        "segments": {"segment_ids": array(rows, length, of=jnp.int32)},
        "trees": {"parents": array(rows, length, of=jnp.int32)},
        "no states of tokens": {"keeps_token_states": False},
    }
    states = None if state is None else array(slots or sequences, heads, size, size, of=state)
    made = {name: x for field in fields for name, x in given[field].items()}
    made |= {"sequence_state": states} if packed else {"initial_state": states}
    made |= {"cu_seqlens": array(sequences + 1, of=jnp.int32)} if packed else {}
    made |= {"state_slots": array(sequences, of=jnp.int32)} if slots else {}
    made |= {"transposed_states": transposed}
    return LinearRecurrence(query=query, key=query, value=query, softmax_scale=0.1, **made)


def launched(record, device):
    """The launches of a step."""
    tile = decode_config.heuristic(record, device, "forward")
    with target_device(device), launch.collect_launches() as calls:
        jax.eval_shape(lambda record: decode_forward.forward(record, tile), record)
    return calls


ALL = ("gates", "value gates", "beta", "segments")


@pytest.mark.parametrize(
    ("chip", "fields", "options"),
    [
        *((chip, ALL, {}) for chip in CHIPS),
        ("sm_80", ("gates", "beta"), {"packed": True, "size": 256}),
        ("sm_90", ("gate", "dt"), {"tokens": 1, "size": 64}),
        ("sm_90", (), {"state": None}),
        ("gfx942", ("gate", "beta"), {"packed": True}),
        ("sm_90", ("gates", "beta"), {"packed": True, "slots": 100}),
        ("sm_90", ("gate", "dt"), {"packed": True, "slots": 100, "transposed": True}),
        ("gfx942", ("gate", "dt"), {"packed": True, "slots": 100, "transposed": True}),
        ("sm_90", ("gates", "beta", "trees"), {"packed": True, "slots": 100}),
        ("gfx942", ("gate", "dt", "trees"), {"transposed": True, "tokens": 16}),
        ("sm_90", ("gates", "beta", "trees", "no states of tokens"), {"packed": True, "slots": 100}),
    ],
)
def test_the_kernel_fits_the_chip_and_spills_nothing(chip, fields, options):
    (call,) = calls = launched(record_of(*fields, **options), CHIPS[chip])
    assert_fits_and_spills_nothing(calls, chip)
    if chip.startswith("sm_") and fields:
        assembly = ahead.compile_for_chip(call, chip).assembly
        assert "ld.global.v4" in assembly
        assert "st.global.v4" in assembly or "no states of tokens" in fields


@pytest.mark.parametrize("packed", [False, True])
def test_states_in_float32_are_updated_in_their_own_memory(packed):
    (call,) = launched(record_of("gate", packed=packed), H200)
    (source,) = call.aliases
    assert call.outputs[call.aliases[source]] == call.inputs[source]
    assert call.inputs[source].shape[-4:] == (64, 16, 128, 128)
    (call,) = launched(record_of("gate", packed=packed, state=jnp.bfloat16), H200)
    assert not call.aliases, "the final state is float32: one in bfloat16 has no room for it"


@pytest.mark.parametrize("state", [jnp.float32, jnp.bfloat16])
def test_slots_are_updated_in_their_own_memory(state):
    (call,) = launched(record_of("gate", packed=True, state=state, slots=100), H200)
    (source,) = call.aliases
    assert call.outputs[call.aliases[source]] == call.inputs[source]
    assert call.inputs[source].shape == (1, 100, 16, 128, 128)


def test_states_of_trees_leave_the_states_in_slots_unchanged():
    """Until tokens are accepted, the states in slots stay as they are."""
    (call,) = launched(record_of("gate", "trees", packed=True, slots=100), H200)
    assert not call.aliases
    assert call.outputs[0].shape == (1, 512, 16, 128, 128)


def test_trees_whose_states_are_not_kept_have_no_memory_for_them():
    record = record_of("gate", "trees", "no states of tokens", packed=True, slots=100)
    (call,) = launched(record, H200)
    assert not call.aliases
    assert call.outputs[0].shape == (1, 1)
    tile = decode_config.heuristic(record, H200, "forward")
    with target_device(H200), launch.collect_launches():
        (_, slots), _ = jax.eval_shape(lambda record: decode_forward.forward(record, tile), record)
    assert (slots.shape, slots.dtype) == (record.sequence_state.shape, record.sequence_state.dtype)


def reasons(record, op="gated_delta_rule"):
    found = dispatch.choose(registry().ops[op], record, H200, "auto", "forward").verdicts
    return {v.implementation.name: v.reasons for v in found}["triton_decode"]


def test_calls_with_too_many_tokens_are_refused_by_argument_name():
    assert not any("query" in reason for reason in reasons(record_of("beta", tokens=8)))
    assert "query: 9 tokens of 1 sequences; the decode step supports at most 8 tokens per sequence" in reasons(
        record_of("beta", tokens=9)
    )
    assert any(r.startswith("query: 576 tokens of 64 sequences") for r in reasons(record_of(tokens=9, packed=True)))


def test_one_packed_sequence_may_not_have_many_tokens():
    """Its tokens are processed one after another, and the lengths are traced."""
    (reason,) = (r for r in reasons(record_of("beta", tokens=8, packed=True)) if r.startswith("query"))
    assert reason.startswith("query: one of 64 packed sequences may have 449 tokens")
    assert not any(r.startswith("query") for r in reasons(record_of("beta", tokens=4, packed=True)))


@pytest.mark.parametrize(("fields", "op"), [(("gate",), "recurrent_attention"), (("beta",), "gated_delta_rule")])
def test_decode_steps_have_priority_over_chunked_kernels(fields, op):
    found = [i for i in registry().implementations[op] if i.platform in ("xla", "triton")]
    order = sorted(found, key=lambda i: i.priority_for(record_of(*fields), H200), reverse=True)
    assert order[0].name == "triton_decode"
    for tokens, refused in ((1, False), (8, False), (9, True)):
        said = reasons(record_of(*fields, tokens=tokens), op)
        assert any(reason.startswith("query") for reason in said) == refused
