"""`state_space_v1`: what it computes and promises, and what it refuses."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import selective_scan_loop as loop
import transformed
from hypothesis import given, settings
from hypothesis import strategies as st
from selective_scan_calls import WAYS, make

import ejkernel
from ejkernel.modules import StateSpaceV1, state_space_v1
from ejkernel.modules.operations.state_space_v1 import OP, StateSpaceV1Arguments

# rows, tokens, channels, numbers a state, optional arrays
CALLS = {
    "one token": (2, 1, 3, 4, ("gate", "initial_state")),
    "less than an interval": (1, 63, 5, 2, ()),
    "an interval and one": (2, 65, 3, 4, ("gate",)),
    "three intervals, the last of one token": (1, 129, 3, 1, ("initial_state",)),
    "60 channels": (1, 21, 60, 3, ("gate", "initial_state")),
    "no rows": (0, 5, 3, 4, ("gate", "initial_state")),
}

TREES = ("one token", "an interval and one", "no rows")


def run(arrays, **options):
    """The public call with all arrays by name: output and final states."""
    positional = [arrays[name] for name in ("hidden_states", "A", "B", "C", "D", "dt")]
    named = {name: arrays[name] for name in ("gate", "initial_state") if name in arrays}
    return state_space_v1(*positional, **named, platform="xla", **options)[:2]


@pytest.mark.parametrize(("name", "way"), [*((name, "loop") for name in CALLS), *((name, "tree") for name in TREES)])
def test_values_and_gradients_are_the_formula(name, way):
    with jax.enable_x64(True):
        arrays = make(*CALLS[name])
        names, every = list(arrays), range(len(arrays))

        def call(*values):
            return run(dict(zip(names, values, strict=True)), cfg=WAYS[way])

        def meaning(*values):
            return OP.reference(StateSpaceV1Arguments(**dict(zip(names, values, strict=True))))[:2]

        values = [jnp.asarray(x) for x in arrays.values()]
        got = transformed.quickly(transformed.graded(call, every))(*values)
        assert all(x.dtype == jnp.float64 for x in jax.tree.leaves(got))
        transformed.close(got[0], loop.state_space_v1(**arrays), 1e-11, 1e-11)
        transformed.close(got, transformed.quickly(transformed.graded(meaning, every))(*values), 1e-10, 1e-10)
        transformed.check_finite_differences(call, values, every)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_states_are_float32_and_lose_nothing_to_a_narrow_input(dtype):
    arrays = make(1, 200, 4, 3, ("initial_state",))
    arrays["dt"] = 0.01 * arrays["dt"]  # a slow state: sums of hundreds of small parts
    narrow = {name: jnp.asarray(x).astype(dtype) for name, x in arrays.items()}
    output, state = run(narrow)
    assert (output.dtype, state.dtype) == (dtype, jnp.float32)
    wide = {name: np.asarray(x, float) for name, x in narrow.items()}
    np.testing.assert_allclose(state, loop.state_space_v1(**wide)[1], rtol=1e-5, atol=1e-6)


def test_activations_are_those_of_the_call():
    arrays = make(2, 7, 3, 2, ("gate",), dtype=np.float32)
    for act_fn, formula in ((jnp.tanh, np.tanh), (lambda x: x * x, np.square), (None, loop.silu)):
        got = run(arrays, act_fn=act_fn)
        transformed.close(got, loop.state_space_v1(**arrays, act_fn=formula), 2e-5, 2e-6)
        transformed.close(jax.jit(lambda given, act_fn=act_fn: run(given, act_fn=act_fn))(arrays), got)


def test_conv_states_are_handed_back_as_they_are():
    arrays, conv = make(2, 7, 3, 2, dtype=np.float32), jnp.arange(24.0, dtype=jnp.bfloat16).reshape(2, 3, 4)
    positional = list(arrays.values())
    y, state, given_back = state_space_v1(*positional, None, None, conv)
    assert given_back.dtype == conv.dtype
    np.testing.assert_array_equal(given_back, conv)
    transformed.close((y, state), run(arrays), 0, 0)
    assert state_space_v1(*positional)[2] is None
    gradient = jax.grad(lambda conv: 3.0 * state_space_v1(*positional, conv_state=conv)[2].sum())(conv)
    np.testing.assert_array_equal(gradient, jnp.full_like(conv, 3))


def test_a_sequence_in_parts_is_the_sequence():
    arrays = make(2, 100, 3, 4, ("gate", "initial_state"), dtype=np.float32)
    timed = ("hidden_states", "B", "C", "dt", "gate")

    def part(start, end, state):
        cut = {name: x[:, start:end] if name in timed else x for name, x in arrays.items()}
        return run({**cut, "initial_state": state})

    outputs, state = [], arrays["initial_state"]
    for start, end in ((0, 64), (64, 65), (65, 100)):
        output, state = part(start, end, state)
        outputs.append(output)
    transformed.close((jnp.concatenate(outputs, axis=1), state), run(arrays))


def test_the_class_runs_the_operation():
    positional = list(make(1, 5, 3, 2, dtype=np.float32).values())
    space = StateSpaceV1()
    transformed.close(space.run(*positional), state_space_v1(*positional), 0, 0)
    assert space.op_id == "state_space_v1"


def test_the_configuration_chooses_how_the_scan_is_computed():
    positional = list(make(1, 5, 3, 2, dtype=np.float32).values())
    for cfg in WAYS.values():
        decision = ejkernel.explain(state_space_v1, *positional, cfg=cfg)
        assert decision.forward.config.associative is decision.backward.config.associative is cfg.associative


X, A, TOKENS, D = jnp.zeros((2, 8, 3)), jnp.zeros((3, 4)), jnp.zeros((2, 8, 4)), jnp.zeros(3)


@pytest.mark.parametrize(
    ("arguments", "options", "says"),
    [
        ((X[0], A, TOKENS, TOKENS, D, X), {}, r"hidden_states: got shape \(8, 3\), wants \[B, T, I\]"),
        ((X[:, :0], A, TOKENS[:, :0], TOKENS[:, :0], D, X[:, :0]), {}, r"hidden_states: .*wants T of at least 1"),
        ((X, A.T, TOKENS, TOKENS, D, X), {}, r"A: got shape \(4, 3\), wants \[I=3, E\]"),
        ((X, A, TOKENS[:1], TOKENS, D, X), {}, r"B: got shape \(1, 8, 4\), wants \[B=2, T=8, E=4\]"),
        ((X, A, TOKENS, X, D, X), {}, r"C: got shape \(2, 8, 3\), wants \[B=2, T=8, E=4\]"),
        ((X, A, TOKENS, TOKENS, D[:2], X), {}, r"D: got shape \(2,\), wants \[I=3\]"),
        ((X, A, TOKENS, TOKENS, D, X[..., :1]), {}, r"dt: got shape \(2, 8, 1\), wants \[B=2, T=8, I=3\]"),
        ((X, A, TOKENS, TOKENS, D, X, TOKENS), {}, r"gate: got shape \(2, 8, 4\), wants \[B=2, T=8, I=3\]"),
        ((X, A, TOKENS, TOKENS, D, X, None, A), {}, r"initial_state: got shape \(3, 4\), wants \[B=2, I=3, E=4\]"),
        ((X, A, TOKENS, TOKENS, D, X), {"conv_state": X}, r"conv_state: got shape \(2, 8, 3\), wants \[B=2, I=3, d_c"),
        ((X.astype(int), A, TOKENS, TOKENS, D, X), {}, "hidden_states: got dtype int32, wants a floating dtype"),
        ((X, A.astype(complex), TOKENS, TOKENS, D, X), {}, "A: got dtype complex64, wants a floating dtype"),
        ((X, A, TOKENS, TOKENS, D, X, X), {"act_fn": "silu"}, "act_fn: got str 'silu', wants a function of an array"),
        ((X, A, TOKENS, TOKENS, D, X), {"act_fn": jnp.tanh}, "act_fn: got .* without gate, wants both or None"),
    ],
)
def test_wrong_calls_are_told_what_is_wrong(arguments, options, says):
    with pytest.raises(ValueError, match=says):
        state_space_v1(*arguments, **options)


@settings(max_examples=10, deadline=None, derandomize=True)
@given(
    tokens=st.sampled_from([1, 64, 70]),
    rows=st.integers(1, 2),
    optional=st.sets(st.sampled_from(["gate", "initial_state"])),
    way=st.sampled_from(sorted(WAYS)),
    seed=st.integers(0, 99),
)
def test_any_call_is_the_formula(tokens, rows, optional, way, seed):
    arrays = make(rows, tokens, 3, 2, optional, seed, np.float32)
    transformed.close(run(arrays, cfg=WAYS[way]), loop.state_space_v1(**arrays), 3e-5, 3e-5)
