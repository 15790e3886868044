"""Recurrences and the causal convolution with their tokens split over eight forced host devices."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import transformed
from jax.sharding import PartitionSpec as P

from ejkernel import explain
from ejkernel.families.linear_recurrence import piece_summaries, token_shards
from ejkernel.modules import (
    causal_conv1d,
    gated_delta_rule,
    gated_linear_attention,
    kernel_delta_attention,
    lightning_attention,
    ragged_gated_delta_rule,
    recurrent_attention,
    rwkv6,
    rwkv7,
    state_space_v1,
    state_space_v2,
)
from ejkernel.ops.grad import CallPlan

B, T, H, G, K, V, CHANNELS, NUMBERS = 2, 32, 4, 2, 4, 3, 4, 3
SEQUENCES = 6

# Shards have four tokens on eight devices. Sequences are longer than shards, empty, end at borders and within shards;
# padding precedes them, follows them and covers whole shards.
LENGTHS = jnp.array([0, 3, 3, 9, 21, 28, 30], jnp.int32)
SLOTS = jnp.array([6, 0, 2, -1, 1, 4], jnp.int32)
SEGMENTS = jnp.array(
    [[0] * 3 + [1] * 2 + [-1] * 9 + [1] * 3 + [2] * 15, [-1] * 6 + [4] * 2 + [5] * 20 + [5] * 2 + [6] * 2], jnp.int32
)

TIME, ALL = P(None, "sp"), P()
HEADS = P(None, "sp", "tp")


def mesh(shape=(8,), names=("sp",)):
    return jax.make_mesh(shape, names, (jax.sharding.AxisType.Auto,) * len(names))


def arrays(dtype=jnp.float32):
    """Arrays of calls by name."""
    keys = iter(jax.random.split(jax.random.key(3), 40))

    def normal(*shape):
        return jax.random.normal(next(keys), shape, dtype)

    gates = -jnp.abs(normal(B, T, H))
    return {
        "query": normal(B, T, H, K),
        "key": normal(B, T, G, K),
        "value": normal(B, T, G, V),
        "values": normal(B, T, H, V),
        "shared query": normal(B, T, G, K),
        "gate": jnp.where(gates < -1.8, -jnp.inf, gates),
        "channels": -jnp.abs(normal(B, T, H, K)),
        "columns": -jnp.abs(normal(B, T, H, V)),
        "gamma": -jnp.abs(normal(H)),
        "bonus": normal(H, K),
        "low rank": normal(B, T, H, K) / 4,
        "reads": normal(B, T, H, K) / 4,
        "beta": jax.nn.sigmoid(normal(B, T, H)),
        "state": normal(B, H, K, V),
        "states": normal(SEQUENCES, H, K, V),
        "slots": normal(SEQUENCES + 2, H, K, V),
        "A heads": -jnp.abs(normal(H)),
        "D heads": normal(H),
        "dt heads": jax.nn.softplus(normal(B, T, H)),
        "states 2": normal(SEQUENCES, H, V, K),
        "x": normal(B, T, CHANNELS),
        "A": -jnp.abs(normal(CHANNELS, NUMBERS)),
        "B": normal(B, T, NUMBERS),
        "C": normal(B, T, NUMBERS),
        "D": normal(CHANNELS),
        "dt": jax.nn.softplus(normal(B, T, CHANNELS)),
        "scan state": normal(B, CHANNELS, NUMBERS),
        "scan slots": normal(SEQUENCES + 2, CHANNELS, NUMBERS),
        "weight": normal(CHANNELS, 7),
        "bias": normal(CHANNELS),
        "last": normal(B, CHANNELS, 6),
        "lasts": normal(SEQUENCES, CHANNELS, 6),
    }


def scan(x, A, B, C, D, dt, state, **options):
    return state_space_v1(x, A, B, C, D, dt, initial_state=state, **options)[:2]


def mamba2(x, A, B, C, D, dt, state, **options):
    return state_space_v2(x, A, B, C, D, dt, initial_state=state, cu_seqlens=LENGTHS, **options)[:2]


def in_slots(x, A, B, C, D, dt, slots, **options):
    return scan(x, A, B, C, D, dt, slots, cu_seqlens=LENGTHS, state_indices=SLOTS, **options)


def ragged(query, key, value, beta, decay, slots, **options):
    return ragged_gated_delta_rule(query[0], key[0], value[0], beta[0], decay[0], slots, LENGTHS, SLOTS, **options)


def plain(query, key, value, g, gamma, gk, gv, state, **options):
    return recurrent_attention(query, key, value, g, gamma, gk, gv, state, return_state=True, **options)


def packed_plain(query, key, value, g, gamma, gk, gv, states, **options):
    return plain(query, key, value, g, gamma, gk, gv, states, cu_seqlens=LENGTHS, **options)


def delta(query, key, value, beta, decay, state, **options):
    return kernel_delta_attention(query, key, value, beta, decay, state, return_state=True, **options)


def convolution(x, weight, bias, state, **options):
    return causal_conv1d(x, weight, bias, state, return_state=True, **options)


def rwkv_6(r, k, v, w, u, states, **options):
    return rwkv6(r, k, v, w, u, initial_state=states, cu_seqlens=LENGTHS, return_state=True, **options)


def rwkv_7(r, w, k, v, a, b, state, **options):
    return rwkv7(r, w, k, v, a, b, initial_state=state, return_state=True, **options)


GATED = ("query", "key", "value", "gate", "gamma", "channels", "columns")
SCAN = ("x", "A", "B", "C", "D", "dt")
SPLIT_SCAN = (TIME, ALL, TIME, TIME, ALL, TIME)
MAMBA2 = ("1 values", "A heads", "1 key", "1 shared query", "D heads", "1 dt heads", "states 2")

# function, names of its arrays ("1 ...": the first row), specs, options
CALLS = {
    "every gate": (plain, (*GATED, "state"), (TIME,) * 3, {}),
    "every gate, packed": (packed_plain, (*(f"1 {x}" for x in GATED if x != "gamma"), "states"), (TIME,) * 3, {}),
    "segments": (plain, (*GATED, "state"), (TIME,) * 3, {"seg_ids": SEGMENTS}),
    "reverse": (plain, (*GATED, "state"), (TIME,) * 3, {"reverse": True, "seg_ids": SEGMENTS}),
    "gla in slots": (
        lambda q, k, v, g, slots, **options: gated_linear_attention(
            q, k, v, g, None, slots, LENGTHS, state_indices=SLOTS, return_state=True, **options
        ),
        ("1 query", "1 key", "1 value", "1 channels", "slots"),
        (TIME,) * 3,
        {},
    ),
    "lightning": (
        lambda q, k, v, **options: (lightning_attention(q, k, v, layer_idx=1, num_layers=4, **options),),
        ("query", "key", "value"),
        (TIME,) * 3,
        {},
    ),
    "delta, shared queries": (
        lambda q, k, v, b, g, s, **options: gated_delta_rule(q, k, v, b, g, None, s, return_state=True, **options),
        ("shared query", "key", "values", "beta", "gate", "state"),
        (TIME,) * 5,
        {},
    ),
    "delta, packed": (
        delta,
        ("1 query", "1 key", "1 value", "1 beta", "1 channels", "states"),
        (TIME,) * 5,
        {"cu_seqlens": LENGTHS},
    ),
    "delta, segments": (
        delta,
        ("query", "key", "value", "beta", "channels", "state"),
        (TIME,) * 5,
        {"seg_ids": SEGMENTS},
    ),
    "delta in slots": (
        ragged,
        ("1 query", "1 key", "1 value", "1 beta", "1 gate", "slots"),
        (P("sp"), P("sp"), P("sp"), P("sp"), P("sp"), ALL, ALL, ALL),
        {},
    ),
    "rwkv6, packed": (
        rwkv_6,
        ("1 query", "1 key", "1 value", "1 channels", "bonus", "states"),
        (TIME,) * 4 + (ALL,),
        {},
    ),
    "rwkv7": (rwkv_7, ("query", "channels", "key", "value", "low rank", "reads", "state"), (TIME,) * 6, {}),
    "mamba 1": (scan, (*SCAN, "scan state"), SPLIT_SCAN, {}),
    "mamba 1 in slots": (in_slots, ("1 x", "A", "1 B", "1 C", "D", "1 dt", "scan slots"), SPLIT_SCAN, {}),
    "mamba 2, packed": (mamba2, MAMBA2, SPLIT_SCAN, {}),
    "convolution": (convolution, ("x", "weight", "bias", "last"), (TIME, ALL, ALL, ALL), {}),
    "convolution, packed": (
        convolution,
        ("1 x", "weight", "bias", "lasts"),
        (TIME, ALL, ALL, ALL),
        {"cu_seqlens": LENGTHS},
    ),
}


def call(name):
    """Returns a function of arrays and call options, its arrays, and what splits their tokens over eight devices."""
    function, names, in_specs, options = CALLS[name]
    every = arrays()
    inputs = [every[name[2:]][:1] if name.startswith("1 ") else every[name] for name in names]
    if function is packed_plain:
        inputs.insert(4, every["gamma"])
    tokens = P("sp") if function is ragged else TIME
    out_specs = tokens if name == "lightning" else (tokens, ALL)
    placed = {"mesh": mesh(), "in_specs": in_specs, "out_specs": out_specs}

    def run(*inputs, **placed):
        return jax.tree.leaves(function(*inputs, **options, **placed))

    return run, inputs, placed


def graded(run, inputs, **placed):
    return transformed.graded(lambda *inputs: run(*inputs, **placed), range(len(inputs)))


@pytest.mark.parametrize("name", CALLS)
def test_tokens_split_over_devices_mean_the_same(name):
    run, inputs, placed = call(name)
    split = transformed.quickly(graded(run, inputs, **placed))(*inputs)
    transformed.close(split, transformed.quickly(graded(run, inputs))(*inputs), rtol=1e-4, atol=2e-5)
    assert split[0][0].sharding.spec[placed["in_specs"][0].index("sp")] == "sp"


@pytest.mark.parametrize("name", ["every gate, packed", "delta, packed"])
def test_tokens_at_borders_that_forget_are_the_summary_of_a_shard(monkeypatch, name):
    """The gates of some pairs of tokens forget what was before, those of others do not."""
    monkeypatch.setattr(piece_summaries, "TOKENS_PER_PIECE", 1)
    monkeypatch.setattr(token_shards, "GATED_TOKENS_AT_BORDER", 2)
    run, inputs, placed = call(name)
    strong = jnp.where(jnp.arange(T) // 2 % 5 == 1, 90.0, 1.0)
    names = CALLS[name][1]
    gates = [n for n, x in enumerate(names) if x.removeprefix("1 ") in ("gate", "channels", "columns")]
    for n in gates:
        at = n + (name == "every gate, packed" and n > 3)
        inputs[at] = inputs[at] * strong.reshape(1, T, *(1,) * (inputs[at].ndim - 2))
    split = transformed.quickly(graded(run, inputs, **placed))(*inputs)
    transformed.close(split, transformed.quickly(graded(run, inputs))(*inputs), rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_delta_rules_split_over_tokens_in_16_bits(dtype):
    """A state that enters may exceed float16's range."""
    run, inputs, placed = call("delta, packed")
    *tokens, states = inputs
    inputs = [*(x.astype(dtype) for x in tokens), states.at[3].mul(1e5)]
    split = transformed.quickly(lambda *inputs: run(*inputs, **placed))(*inputs)
    want = run(*(x.astype(jnp.float32) for x in inputs))
    assert np.isfinite(split[1]).all()
    within = jnp.finfo(dtype).eps * 8 * jnp.max(jnp.abs(want[1]))
    np.testing.assert_allclose(split[1], want[1], atol=float(within))
    kept = (np.arange(T) < LENGTHS[3]) | (np.arange(T) >= LENGTHS[4])
    got = np.asarray(split[0], np.float32)[:, kept]
    np.testing.assert_allclose(got, want[0][:, kept], atol=float(jnp.finfo(dtype).eps) * 16)


@pytest.mark.parametrize("name", ["every gate, packed", "delta, packed", "mamba 1 in slots", "convolution, packed"])
def test_nan_of_a_sequence_stays_in_it(name):
    """Sequence 3 begins in one shard, covers another and ends in a third; all of its tokens are NaN."""
    run, inputs, placed = call(name)
    first, last = LENGTHS[3:5]
    poisoned = [x.at[:, first:last].set(jnp.nan) if x.shape[:2] == (1, T) else x for x in inputs]
    forward = transformed.quickly(lambda *inputs: run(*inputs, **placed))
    (output, states), (want, want_states) = forward(*poisoned), forward(*inputs)
    kept = np.arange(T)[(np.arange(T) < first) | (np.arange(T) >= last)]
    np.testing.assert_array_equal(output[:, kept], want[:, kept])
    others = np.flatnonzero(np.arange(states.shape[0]) != (3 if states.shape[0] == SEQUENCES else SLOTS[3]))
    np.testing.assert_array_equal(states[others], want_states[others])


COLLECTIVE = re.compile(r"= (.*) (all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute)(?:-start)?\(")


def exchanged(program):
    """Returns the kinds and the largest sizes of the arrays that the devices of a compiled program exchange."""
    sizes = {}
    for results, kind in COLLECTIVE.findall(program):
        shapes = re.findall(r"\w+\[([\d,]*)\]", results)
        size = max(int(np.prod([int(n) for n in shape.split(",") if n])) for shape in shapes)
        sizes[kind] = max(sizes.get(kind, 0), size)
    return sizes


@pytest.mark.parametrize("name", ["every gate", "delta, packed", "mamba 1", "convolution"])
def test_devices_exchange_summaries_alone(name):
    """A call of twice the tokens exchanges the same arrays in both passes: none has an axis of tokens."""
    run, inputs, placed = call(name)
    compile_for_chip = transformed.quickly(graded(run, inputs, **placed)).lower
    programs = []
    for times in (2, 4):  # shards of one convolution hold fewer tokens than it has weights
        long = [jnp.tile(x, (1, times, *(1,) * (x.ndim - 2))) if T in x.shape[1:2] else x for x in inputs]
        programs.append(exchanged(compile_for_chip(*long).compile().as_text()))
    assert programs[0] == programs[1]
    assert "all-gather" in programs[0]
    assert not {"all-to-all", "collective-permute"} & set(programs[0])


@pytest.mark.parametrize("name", ["heads too", "two axes", "bfloat16"])
def test_split_tokens_on_other_meshes_and_in_other_dtypes(name):
    every = arrays(jnp.bfloat16 if name == "bfloat16" else jnp.float32)
    inputs = [every[x] for x in ("query", "key", "values", "gate")]
    inputs[1] = jnp.repeat(inputs[1], H // G, axis=2)
    spec = P(None, ("tp", "sp")) if name == "two axes" else HEADS
    placed = {"mesh": mesh((4, 2), ("sp", "tp")), "in_specs": (spec,) * 4, "out_specs": spec}

    def run(*inputs, **placed):
        return [recurrent_attention(*inputs, **placed).astype(jnp.float32)]

    got = transformed.quickly(graded(run, inputs, **placed))(*inputs)
    want = transformed.quickly(graded(run, inputs))(*inputs)
    rtol, atol = (3e-2, 3e-2) if name == "bfloat16" else (1e-4, 2e-5)
    transformed.close_sums(jax.tree.map(lambda x: x.astype(jnp.float32), got), want, rtol, atol)


def test_split_tokens_under_vmap_checkpoint_and_explicit_axes():
    run, inputs, placed = call("segments")
    want = run(*inputs)

    def rows(*inputs):
        return jax.checkpoint(lambda *inputs: run(*inputs, **placed))(*inputs)

    stacked = [jnp.stack([x, x]) for x in inputs]
    got = transformed.quickly(jax.vmap(rows))(*stacked)
    transformed.close([x[1] for x in got], want, rtol=1e-4, atol=2e-5)
    explicit = jax.make_mesh((8,), ("sp",), (jax.sharding.AxisType.Explicit,))
    with jax.set_mesh(explicit):
        query, key, values, channels = (
            jax.reshard(arrays()[x], TIME) for x in ("shared query", "key", "value", "channels")
        )
        output = gated_linear_attention(query, key, values, channels[:, :, :G])
        assert jax.typeof(output).sharding.spec == P(None, "sp", None, None)
    plain = [arrays()[x] for x in ("shared query", "key", "value")]
    transformed.close(output, gated_linear_attention(*plain, arrays()["channels"][:, :, :G]), rtol=1e-4, atol=2e-5)


def test_split_tokens_without_gates_and_with_64_bit_types():
    """The factor on the state is 1, of the states' dtype: a scan over shards has carries of one dtype."""
    inputs = [jnp.asarray(arrays()[x], jnp.float32) for x in ("query", "key", "value", "state")]

    def run(query, key, value, state, **placed):
        return recurrent_attention(query, key, value, None, None, None, None, state, return_state=True, **placed)

    placed = {"mesh": mesh(), "in_specs": (TIME,) * 3, "out_specs": (TIME, ALL)}
    with jax.enable_x64(True):
        got, want = (transformed.quickly(graded(run, inputs, **options))(*inputs) for options in (placed, {}))
    transformed.close(got, want, rtol=1e-4, atol=2e-5)


def test_explain_is_about_the_tokens_of_one_device(monkeypatch):
    judged, choose = [], CallPlan.choose

    def noted(plan, record, *arguments, **options):
        judged.append(record)
        return choose(plan, record, *arguments, **options)

    monkeypatch.setattr(CallPlan, "choose", noted)
    _, inputs, placed = call("delta, packed")
    options = {"cu_seqlens": LENGTHS, "return_state": True}
    decision = explain(kernel_delta_attention, *inputs, **options, **placed)
    assert {record.query.shape[1] for record in judged} == {T // 8}
    assert decision.forward.implementation is not None
    assert decision.backward.implementation is not None


def test_tokens_that_do_not_divide_are_refused():
    every = arrays()
    tokens = [every[name][:, :30] for name in ("query", "key", "value")]
    with pytest.raises(ValueError, match="'t' of size 30 does not divide into 8 parts"):
        recurrent_attention(*tokens, mesh=mesh(), in_specs=(TIME,) * 3, out_specs=TIME)
