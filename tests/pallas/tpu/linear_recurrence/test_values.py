"""The linear recurrence's TPU kernels, interpreted, against the family's meaning, at gates as layers have them."""

import dataclasses
import functools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tpu_races import found
from tpu_records import interpreted, simulated

from ejkernel.families.linear_recurrence import LinearRecurrence, reference
from ejkernel.types.pullback import Pullback
from ejkernel_pallas.tpu.linear_recurrence import implementations
from ejkernel_pallas.tpu.linear_recurrence.backward import backward
from ejkernel_pallas.tpu.linear_recurrence.config import TpuRecurrence
from ejkernel_pallas.tpu.linear_recurrence.forward import forward

CONFIG = TpuRecurrence(chunk_size=32, heads=2)


def initial_gates(random, *shape):
    """Log gates as Kimi Linear initialises them: A uniform in 1 to 16, step sizes log-uniform in 1e-3 to 0.1."""
    rates, steps = random.uniform(1, 16, shape), np.exp(random.uniform(np.log(1e-3), np.log(0.1), shape))
    return -rates * steps


def strong_gates(random, *shape):
    """Log gates of all strengths, some of which forget everything."""
    gates = -np.exp(random.uniform(-6, 5, shape))
    return np.where(random.random(shape) < 0.05, -np.inf, gates)


def directions(x):
    """The vectors, of length one."""
    return x / jnp.linalg.norm(x, axis=3, keepdims=True).astype(x.dtype)


def record(tokens=75, heads=4, keys=4, values=4, size=16, dtype="float32", gates=initial_gates, **fields):
    """One row of tokens; fields are named and get normal numbers, or what a field must have."""
    random = np.random.default_rng(3)

    def normal(*shape, of=dtype):
        return jnp.asarray(random.normal(size=shape), of)

    made = {
        "decay": lambda: jnp.asarray(gates(random, 1, tokens, heads, 1), jnp.float32),
        "channels": lambda: jnp.asarray(gates(random, 1, tokens, heads, size), jnp.float32),
        "value_decay": lambda: jnp.asarray(gates(random, 1, tokens, heads, 24), jnp.float32),
        "constant": lambda: jnp.asarray(gates(random, 1, 1, heads, 1), jnp.float32),
        "beta": lambda: jnp.asarray(random.uniform(0, 1, (1, tokens, heads)), jnp.float32),
        "dt": lambda: jnp.asarray(random.uniform(0, 0.1, (1, tokens, heads)), jnp.float32),
        "skip": lambda: normal(1, 1, heads, of="float32"),
        "low_rank_write": lambda: directions(normal(1, tokens, heads, size)),
        "low_rank_read": lambda: directions(normal(1, tokens, heads, size)),
        "initial_state": lambda: normal(1, heads, size, 24, of="float32"),
        "sequence_state": lambda: normal(4, heads, size, 24, of="float32"),
        "cu_seqlens": lambda: jnp.asarray([0, 40, 40, 41, tokens - 3], jnp.int32),
        "segment_ids": lambda: jnp.asarray([[0] * 20 + [1] * 30 + [-1] * 5 + [2] * (tokens - 55)], jnp.int32),
    }
    given = {
        {"channels": "decay", "constant": "decay"}.get(name, name): made[name]() for name, has in fields.items() if has
    }
    key = directions(normal(1, tokens, keys, size))
    query, value = normal(1, tokens, heads if keys == heads else keys, size), normal(1, tokens, values, 24)
    return LinearRecurrence(query=query, key=key, value=value, softmax_scale=0.25, **given)


LOW_RANK = {"low_rank_write": True, "low_rank_read": True}
CASES = {
    "no gates": record,
    "a gate a head, the same for all tokens": partial(record, constant=True, initial_state=True),
    "a gate a head": partial(record, decay=True),
    "a gate a head, of all strengths": partial(record, decay=True, gates=strong_gates),
    "a gate a channel": partial(record, channels=True, initial_state=True),
    "a gate a channel, of all strengths": partial(record, channels=True, gates=strong_gates),
    "gates of keys and values": partial(record, channels=True, value_decay=True),
    "state space, groups": partial(record, decay=True, dt=True, skip=True, keys=1),
    "gated delta rule, more value heads": partial(record, decay=True, beta=True, keys=2),
    "KDA, of all strengths": partial(record, channels=True, beta=True, gates=strong_gates),
    "KDA, segments": partial(record, channels=True, beta=True, segment_ids=True, initial_state=True),
    "gated delta rule, segments": partial(record, decay=True, beta=True, segment_ids=True, gates=strong_gates),
    "gated delta rule, packed": partial(record, decay=True, beta=True, cu_seqlens=True, sequence_state=True),
    "low-rank term, segments": partial(
        record, constant=True, segment_ids=True, initial_state=True, gates=strong_gates, **LOW_RANK
    ),
    "low-rank term, packed": partial(
        record, channels=True, keys=2, cu_seqlens=True, sequence_state=True, gates=strong_gates, **LOW_RANK
    ),
}


def passes(made, config=CONFIG):
    """Output, final states and all gradients, of cotangents that are all different."""
    (read, final), residuals = forward(made, config)
    cotangent = jax.tree.map(lambda x: jnp.cos(jnp.arange(x.size, dtype=jnp.float32)).reshape(x.shape), (read, final))
    cotangent = (cotangent[0].astype(read.dtype), cotangent[1])
    wanted = frozenset(name for name in differentiable(made))
    pullback = Pullback(record=made, residuals=residuals, output=None, cotangent=cotangent, grad_fields=wanted)
    return (read, final), cotangent, backward(pullback, config)


def differentiable(made):
    names = ("query", "key", "value", "decay", "value_decay", "beta", "dt", "skip", "initial_state", "sequence_state")
    names += ("low_rank_write", "low_rank_read")
    return [name for name in names if getattr(made, name) is not None]


def compare(made, got, tolerance):
    (output, cotangent, gradients), names = got, differentiable(made)

    def of(fields):
        return reference(dataclasses.replace(made, **fields))[0]

    wanted, pull = jax.vjp(of, {name: getattr(made, name) for name in names})
    (of_fields,) = pull(cotangent)
    pairs = {"output": (output[0], wanted[0]), "states": (output[1], wanted[1])}
    for name, (mine, theirs) in (pairs | {name: (gradients[name], of_fields[name]) for name in names}).items():
        assert (mine.dtype, mine.shape) == (theirs.dtype, theirs.shape), name
        mine, theirs = np.asarray(mine, np.float64), np.asarray(theirs, np.float64)
        assert np.isfinite(mine).all(), name
        error = np.linalg.norm(mine - theirs) / max(np.linalg.norm(theirs), 1e-3)
        assert error < tolerance, (name, error)


@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients(name):
    made = CASES[name]()
    with interpreted():
        compare(made, jax.jit(passes)(made), 3e-5)


@pytest.mark.parametrize("name", ["a gate a head, of all strengths", "KDA, of all strengths"])
def test_values_and_gradients_of_bfloat16(name):
    made = CASES[name](dtype="bfloat16")
    with interpreted():
        compare(made, jax.jit(passes)(made), 2e-2)


def test_a_chunk_longer_than_the_sequence():
    made = record(tokens=60, decay=True, beta=True)
    with interpreted():
        compare(made, jax.jit(partial(passes, config=TpuRecurrence(chunk_size=128, heads=4)))(made), 3e-5)


@pytest.mark.parametrize("name", ["a gate a channel", "gated delta rule, packed", "low-rank term, segments"])
def test_no_races(name):
    made = CASES[name]()
    with simulated():
        compare(made, jax.jit(passes)(made), 3e-5)
    assert not found()


def in_slots(lengths, indices, dtype="float32", **fields):
    """A record whose sequences have their states in 6 slots."""
    made = record(tokens=sum(lengths) + 2, **fields)
    starts = jnp.asarray(np.cumsum([0, *lengths]), jnp.int32)
    slots = jnp.asarray(np.random.default_rng(1).normal(size=(6, 4, 16, 24)), dtype)
    return dataclasses.replace(made, cu_seqlens=starts, sequence_state=slots, state_slots=jnp.asarray(indices))


STEPS = {
    "decode": ([1] * 5, [3, 1, 5, 0, 2]),
    "several tokens, some without a slot": ([2, 8, 0, 3, 1], [-1, 4, 0, 99, 2]),
    "mixed prefill and decode": ([1, 40, 1, 0, 1], [5, 1, 0, 2, 3]),
    "nobody has a slot": ([1, 2, 1], [-1, 6, -1]),
    "nobody has tokens": ([0, 0, 0], [1, 1, 2]),
}
RULES = {
    "gated delta rule": {"decay": True, "beta": True, "keys": 2},
    "KDA": {"channels": True, "beta": True},
    "state space": {"decay": True, "dt": True, "skip": True, "keys": 1},
    "gates of keys and values": {"channels": True, "value_decay": True},
    "low-rank term": {"channels": True, "keys": 2, **LOW_RANK},
}


@functools.cache
def slot_forward(chunk_size=8):
    return jax.jit(lambda made: forward(made, TpuRecurrence(chunk_size=chunk_size, heads=2))[0])


def compare_slots(made, chunk_size=8):
    for got, wanted in zip(slot_forward(chunk_size)(made), reference(made)[0], strict=True):
        assert (got.dtype, got.shape) == (wanted.dtype, wanted.shape)
        np.testing.assert_allclose(*(np.asarray(x, np.float32) for x in (got, wanted)), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("name", STEPS)
def test_states_in_slots_are_updated(name):
    with interpreted():
        compare_slots(in_slots(*STEPS[name], **RULES["gated delta rule"]))


@pytest.mark.parametrize(
    ("name", "rule", "chunk_size"),
    [
        ("decode", "gated delta rule", 1),
        ("several tokens, some without a slot", "KDA", 2),
        ("several tokens, some without a slot", "state space", 4),
        ("mixed prefill and decode", "gates of keys and values", 4),
        ("nobody has a slot", "gated delta rule", 1),
        ("nobody has tokens", "KDA", 1),
        ("several tokens, some without a slot", "low-rank term", 2),
    ],
)
def test_states_in_slots_are_updated_token_by_token(name, rule, chunk_size):
    with simulated():
        compare_slots(in_slots(*STEPS[name], **RULES[rule]), chunk_size)
    assert not found()


@pytest.mark.parametrize("rule", RULES)
def test_states_in_slots_with_every_update_rule(rule):
    with interpreted():
        compare_slots(in_slots(*STEPS["several tokens, some without a slot"], **RULES[rule]))


@pytest.mark.parametrize("chunk_size", [1, 8])
def test_bfloat16_slots_without_a_sequence_are_unchanged(chunk_size):
    made = in_slots(*STEPS["decode"], dtype="bfloat16", **RULES["KDA"])
    made = dataclasses.replace(made, sequence_state=made.sequence_state.at[4].set(jnp.nan))
    with interpreted():
        read, slots = slot_forward(chunk_size)(made)
    assert np.isfinite(np.asarray(read)).all()
    assert np.isnan(np.asarray(slots[4], np.float32)).all()
    assert np.isfinite(np.asarray(jnp.delete(slots, 4, axis=0), np.float32)).all()


def test_states_in_slots_under_vmap():
    made = in_slots([1, 2, 1], [3, 1, 5], **RULES["gated delta rule"])

    def of(slots, indices, run=forward):
        record = dataclasses.replace(made, sequence_state=slots, state_slots=indices)
        return run(record, TpuRecurrence(chunk_size=8, heads=4))[0]

    given = jnp.stack([made.sequence_state, 2 * made.sequence_state]), jnp.array([[3, 1, 5], [0, -1, 2]])
    with interpreted():
        got = jax.jit(jax.vmap(of))(*given)
    wanted = jax.vmap(lambda *given: of(*given, run=lambda record, _: reference(record)))(*given)
    for x, y in zip(got, wanted, strict=True):
        np.testing.assert_allclose(x, y, rtol=2e-5, atol=2e-5)


def test_no_races_in_slots():
    made = in_slots(*STEPS["several tokens, some without a slot"], **RULES["gated delta rule"])
    with simulated():
        compare_slots(made)
    assert not found()


@pytest.mark.parametrize(
    ("shape", "memory"), [((1, 64, 2, 2048), "VMEM"), ((2**19, 256, 1, 16), "SMEM"), ((1, 64, 2, 1024), None)]
)
def test_states_and_tables_too_large_for_memory_are_refused(shape, memory):
    wide = jax.ShapeDtypeStruct(shape, "bfloat16")
    (implementation,) = implementations()
    reasons = list(implementation.requires.extra(LinearRecurrence(query=wide, key=wide, value=wide, softmax_scale=1.0)))
    assert len(reasons) == (memory is not None)
    assert all(memory in reason for reason in reasons)


@pytest.mark.parametrize(("field", "value"), [("chunk_size", 48), ("chunk_size", 0), ("heads", 0)])
def test_invalid_configurations_are_refused(field, value):
    with pytest.raises(ValueError, match=field):
        TpuRecurrence(**{"chunk_size": 64, "heads": 8, field: value})
