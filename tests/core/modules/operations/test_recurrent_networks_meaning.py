"""`rnn`, `gru` and `lstm`: what they compute and promise, and what they refuse."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import recurrent_network_loop as loop
import transformed
from hypothesis import given, settings
from hypothesis import strategies as st
from recurrent_network_calls import BIASES, CALLS, EVERYTHING, FUNCTIONS, STATES, make, run

import ejkernel
from ejkernel.modules import GRU, LSTM, RNN, GRUConfig, LSTMConfig, RNNConfig, gru, lstm, rnn
from ejkernel.modules.operations.rnn import RNNArguments, reference
from ejkernel_xla.recurrent_network.config import TokenBlocks

CONFIGS = {"tanh": RNNConfig, "relu": RNNConfig, "gru": GRUConfig, "lstm": LSTMConfig}


@pytest.mark.parametrize("kind", ["tanh", "gru", "lstm"])
@pytest.mark.parametrize("name", CALLS)
def test_values_and_gradients_are_the_formula(kind, name):
    sizes, optional, lengths = CALLS[name]
    with jax.enable_x64(True):
        arrays = make(kind, sizes, optional)
        names, every = list(arrays), range(len(arrays))
        given_lengths = None if lengths is None else jnp.array(lengths)

        def call(*values):
            cfg = CONFIGS[kind](block_t=4)  # with a last block of one token, or of none
            return run(kind, dict(zip(names, values, strict=True)), given_lengths, cfg=cfg)

        values = [jnp.asarray(x) for x in arrays.values()]
        got = transformed.quickly(transformed.graded(call, every))(*values)
        assert all(x.dtype == jnp.float64 for x in jax.tree.leaves(got))
        transformed.close(got[0], loop.network(kind, **arrays, lengths=lengths), 1e-12, 1e-12)
        transformed.check_finite_differences(call, values, every)


def test_relu_has_the_gradients_of_its_reference():  # finite differences would cross its kinks
    sizes, optional, lengths = CALLS["everything"]
    with jax.enable_x64(True):
        arrays = make("relu", sizes, optional)
        names, every, lengths = list(arrays), range(len(arrays)), jnp.array(lengths)

        def meaning(*values):
            given = dict(zip(names, values, strict=True))
            return reference(RNNArguments(**given, seq_lengths=lengths, nonlinearity="relu"))

        def call(*values):
            return run("relu", dict(zip(names, values, strict=True)), lengths)

        got, want = (transformed.quickly(transformed.graded(f, every))(*arrays.values()) for f in (call, meaning))
        transformed.close(got, want, 1e-11, 1e-11)
        transformed.close(got[0], loop.network("relu", **arrays, lengths=CALLS["everything"][2]), 1e-12, 1e-12)


@pytest.mark.parametrize("kind", ["tanh", "gru", "lstm"])
def test_padding_tokens_reach_no_output_or_gradient(kind):
    lengths = np.array([3, 0, 5])
    arrays = make(kind, (3, 5, 2, 2, 2, 3), EVERYTHING, dtype=np.float32)
    names, padding = list(arrays), np.arange(5)[None, :, None] >= lengths[:, None, None]

    def call(*values):
        output, *states = run(kind, dict(zip(names, values, strict=True)), jnp.asarray(lengths))
        return jnp.where(padding, jnp.nan, 1) * output, *states  # a cotangent of NaN where there is padding

    def graded(x):
        outputs, pull = jax.vjp(call, *{**arrays, "x": x}.values())
        return outputs, pull(jax.tree.map(jnp.ones_like, outputs))

    clean, poisoned = (graded(np.where(padding, filling, arrays["x"])) for filling in (0, np.nan))
    transformed.close(poisoned[1], clean[1], 0, 0)
    assert bool((poisoned[1][0] == 0)[np.broadcast_to(padding, arrays["x"].shape)].all())
    output = run(kind, {**arrays, "x": np.where(padding, np.nan, arrays["x"])}, jnp.asarray(lengths))[0]
    assert bool((np.asarray(output)[np.broadcast_to(padding, output.shape)] == 0).all())


@pytest.mark.parametrize("kind", ["tanh", "gru", "lstm"])
def test_rows_with_lengths_match_calls_of_each_row_alone(kind):
    lengths = [7, 2, 5]
    arrays = make(kind, (3, 7, 2, 1, 2, 3), BIASES, dtype=np.float32)
    output, *states = run(kind, arrays, jnp.array(lengths))
    for row, length in enumerate(lengths):
        alone = {**arrays, "x": arrays["x"][row : row + 1, :length]}
        want, *last = run(kind, alone)
        transformed.close((output[row, :length], [x[:, row] for x in states]), (want[0], [x[:, 0] for x in last]))
    # Lengths whose values are known are checked; those of a traced call are clipped.
    traced = jax.jit(lambda lengths: run(kind, arrays, lengths))(jnp.array([99, 2, -1]))
    transformed.close(traced, run(kind, arrays, jnp.array([7, 2, 0])), 1e-6, 1e-6)
    with pytest.raises(ValueError, match=r"seq_lengths: got .*99"):
        run(kind, arrays, jnp.array([99, 2, -1]))


def test_a_sequence_in_two_calls_matches_one_call():
    arrays = make("lstm", (2, 9, 3, 2, 1, 4), BIASES, dtype=np.float32)
    first, hidden, cell = run("lstm", {**arrays, "x": arrays["x"][:, :5]})
    states = {"initial_hidden": hidden, "initial_cell": cell}
    rest, *last = run("lstm", {**arrays, "x": arrays["x"][:, 5:], **states})
    transformed.close((jnp.concatenate([first, rest], axis=1), *last), run("lstm", arrays))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_states_are_float32(dtype):
    arrays = {name: jnp.asarray(x, dtype) for name, x in make("lstm", (2, 40, 3, 1, 1, 4), EVERYTHING).items()}
    output, *states = run("lstm", arrays)
    assert output.dtype == dtype
    assert all(x.dtype == jnp.float32 for x in states)
    want = loop.network("lstm", **{name: np.asarray(x, float) for name, x in arrays.items()})
    transformed.close(tuple(states), want[1:], 5e-3, 5e-3)
    np.testing.assert_array_equal(output[:, -1], states[0][0].astype(dtype))


@pytest.mark.parametrize("kind", ["tanh", "gru", "lstm"])
def test_a_configuration_changes_no_answer(kind):
    arrays = make(kind, (2, 11, 3, 1, 2, 4), dtype=np.float32)
    want = run(kind, arrays)
    for tokens, unroll in ((1, 1), (4, 2), (11, 4), (100, 1)):
        cfg = CONFIGS[kind](block_t=tokens, unroll=unroll)
        transformed.close(run(kind, arrays, cfg=cfg), want)
        decision = ejkernel.explain(FUNCTIONS[kind], *arrays.values(), cfg=cfg)
        assert decision.forward.config == decision.backward.config == TokenBlocks(block_t=tokens, unroll=unroll)
    with pytest.raises(ValueError, match="block_t: got 0, wants at least 1"):
        CONFIGS[kind](block_t=0)


def test_the_classes_run_the_operations():
    for kind, operation in (("tanh", RNN()), ("gru", GRU()), ("lstm", LSTM())):
        arrays = make(kind, (1, 3, 2, 1, 1, 2), dtype=np.float32)
        transformed.close(operation.run(*arrays.values()), run(kind, arrays), 0, 0)
        assert operation.op_id == FUNCTIONS[kind].__name__


X, W, U = jnp.zeros((2, 5, 3)), jnp.zeros((1, 8, 3)), jnp.zeros((1, 1, 8, 2))


@pytest.mark.parametrize(
    ("function", "arguments", "options", "says"),
    [
        (lstm, (X[0], W, U), {}, r"x: got shape \(5, 3\), wants \[B, T, F\]"),
        (lstm, (X[:, :0], W, U), {}, r"x: got shape \(2, 0, 3\), wants T of at least 1"),
        (lstm, (X.astype(int), W, U), {}, "x: got dtype int32, wants a floating dtype"),
        (gru, (X, W, U), {}, r"weight_hh: got shape \(1, 1, 8, 2\), wants \[L, 1 or 2, 3 \* H, H\]"),
        (rnn, (X, W, jnp.zeros((1, 3, 2, 2))), {}, r"weight_hh: .*wants \[L, 1 or 2, 1 \* H, H\]"),
        (lstm, (X, W[0], U), {}, r"weight_ih: got shape \(8, 3\), wants \[R=1, G\*H=8, F=3\]"),
        (lstm, (X, W, U), {"bias_ih": jnp.zeros((1, 8))}, r"bias_ih: got shape \(1, 8\), wants \[L=1, R=1, G\*H=8\]"),
        (lstm, (X, W, U), {"bias_hh": W}, r"bias_hh: got shape \(1, 8, 3\), wants \[L=1, R=1, G\*H=8\]"),
        (lstm, (X, W, U), {"weight_ih_deep": U}, r"weight_ih_deep: got shape \(1, 1, 8, 2\), wants \[L-1=0, R=1"),
        (lstm, (X, W, jnp.zeros((2, 1, 8, 2))), {}, "weight_ih_deep: got None with 2 layers, wants the weights of"),
        (lstm, (X, W, U), {"initial_hidden": X}, r"initial_hidden: got shape \(2, 5, 3\), wants \[L\*R=1, B=2, H=2\]"),
        (lstm, (X, W, U), {"initial_cell": X}, r"initial_cell: got shape \(2, 5, 3\), wants \[L\*R=1, B=2, H=2\]"),
        (lstm, (X, W, U), {"seq_lengths": jnp.zeros(3, int)}, r"seq_lengths: got shape \(3,\), wants \[B=2\]"),
        (lstm, (X, W, U), {"seq_lengths": jnp.zeros(2)}, "seq_lengths: got dtype float32, wants an integer dtype"),
        (rnn, (X, W, U), {"nonlinearity": "gelu"}, "nonlinearity: got .*gelu.*, wants one of 'tanh', 'relu'"),
    ],
)
def test_wrong_calls_are_told_what_is_wrong(function, arguments, options, says):
    with pytest.raises(ValueError, match=says):
        function(*arguments, **options)


@settings(max_examples=10, deadline=None, derandomize=True)
@given(
    kind=st.sampled_from(["tanh", "relu", "gru", "lstm"]),
    directions=st.integers(1, 2),
    optional=st.sets(st.sampled_from([*BIASES, *STATES])),
    lengths=st.none() | st.lists(st.integers(0, 7), min_size=2, max_size=2),
    seed=st.integers(0, 99),
)
def test_random_networks_match_the_formula(kind, directions, optional, lengths, seed):
    arrays = make(kind, (2, 7, 3, 1, directions, 2), optional, seed, np.float32)
    got = run(kind, arrays, None if lengths is None else jnp.array(lengths), cfg=CONFIGS[kind](block_t=3))
    transformed.close(got, loop.network(kind, **arrays, lengths=lengths), 3e-5, 3e-6)
