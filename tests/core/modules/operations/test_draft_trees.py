"""Trees of draft tokens, as speculative decoding verifies them: `parents` of the recurrences and of `causal_conv1d`."""

import functools

import jax
import jax.numpy as jnp
import linear_recurrence_loop as loops
import numpy as np
import pytest
from causal_convolution_loop import causal_conv1d as convolution_loop

from ejkernel.modules import (
    causal_conv1d,
    gated_delta_rule,
    gated_linear_attention,
    kernel_delta_attention,
    lightning_attention,
    ragged,
    ragged_gated_delta_rule,
    state_space_v2,
)

ROWS, TOKENS, HEADS, SIZE = 2, 7, 2, 4
RANDOM = np.random.default_rng(0)
PARENTS = np.array([[RANDOM.integers(-1, t) for t in range(TOKENS)] for _ in range(ROWS)], np.int32)
CHAIN = np.broadcast_to(np.arange(TOKENS, dtype=np.int32) - 1, (ROWS, TOKENS))


def normal(*shape):
    return jnp.asarray(RANDOM.normal(size=shape), jnp.float32)


QUERY, KEY, VALUE, GATES = (normal(ROWS, TOKENS, HEADS, SIZE) for _ in range(4))
BETA, DECAY, STATE = jax.nn.sigmoid(normal(ROWS, TOKENS, HEADS)), -jnp.abs(GATES), normal(ROWS, HEADS, SIZE, SIZE)
DELTA = {"query": QUERY, "key": KEY, "value": VALUE, "beta": BETA, "decay": DECAY}


def path(parents, token):
    """The tokens from the root to this one."""
    tokens = []
    while token >= 0:
        tokens.append(token)
        token = parents[token]
    return np.array(tokens[::-1])


def in_float64(arrays):
    return {name: np.asarray(x, np.float64) for name, x in arrays.items()}


@pytest.mark.parametrize("operation", [gated_delta_rule, kernel_delta_attention])
def test_every_token_of_a_tree_is_the_end_of_its_path(operation):
    output, states = operation(**DELTA, initial_state=STATE, parents=PARENTS, return_state=True)
    arrays = in_float64(DELTA)
    for row, token in np.ndindex(ROWS, TOKENS):
        at = path(PARENTS[row], token)
        fields = {name: x[row : row + 1, at] for name, x in arrays.items()}
        alone, final = loops.delta(**fields, initial_state=np.asarray(STATE[row : row + 1], np.float64))
        np.testing.assert_allclose(output[row, token], alone[0, -1], atol=1e-5)
        np.testing.assert_allclose(states[row, token], final[0], atol=1e-5)


def test_mamba_2_continues_the_parents_state():
    tokens = {"x": VALUE, "B": KEY, "C": QUERY, "dt": BETA}
    weights = {"A": -jnp.arange(1.0, HEADS + 1), "D": normal(HEADS)}
    output, states, _ = state_space_v2(**tokens, **weights, initial_state=STATE, parents=PARENTS)
    arrays, weights = in_float64(tokens), in_float64(weights)
    for row, token in np.ndindex(ROWS, TOKENS):
        at = path(PARENTS[row], token)
        fields = {name: x[row : row + 1, at] for name, x in arrays.items()}
        alone, final = loops.state_space(**fields, **weights, initial_state=np.asarray(STATE[row : row + 1]))
        np.testing.assert_allclose(output[row, token], alone[0, -1], atol=1e-5)
        np.testing.assert_allclose(states[row, token], final[0], atol=1e-5)


def test_gates_decay_along_the_path_of_a_token():
    output, states = gated_linear_attention(
        QUERY, KEY, VALUE, DECAY, initial_state=STATE, parents=PARENTS, return_state=True
    )
    arrays = in_float64({"query": QUERY, "key": KEY, "value": VALUE, "gk": DECAY})
    for row, token in np.ndindex(ROWS, TOKENS):
        at = path(PARENTS[row], token)
        fields = {name: x[row : row + 1, at] for name, x in arrays.items()}
        alone, final = loops.recurrent(**fields, initial_state=np.asarray(STATE[row : row + 1], np.float64))
        np.testing.assert_allclose(output[row, token], alone[0, -1], atol=1e-5)
        np.testing.assert_allclose(states[row, token], final[0], atol=1e-5)


@pytest.mark.parametrize("held", [3, 4])
def test_a_convolution_reads_the_ancestors_of_a_token(held):
    """States of W - 1 tokens, and those of W, as checkpoints hold them."""
    x, weight, before = normal(ROWS, TOKENS, 5), normal(5, 4), normal(ROWS, 5, held)
    output, states = causal_conv1d(
        x, weight, initial_state=before, parents=PARENTS, activation="silu", return_state=True
    )
    assert states.shape == (ROWS, TOKENS, 5, held)
    for row, token in np.ndindex(ROWS, TOKENS):
        at = path(PARENTS[row], token)
        alone, _ = convolution_loop(
            np.asarray(x)[row : row + 1, at],
            weight,
            initial_state=before[row : row + 1, :, held - 3 :],
            activation="silu",
        )
        np.testing.assert_allclose(output[row, token], alone[0, -1], atol=1e-5)
        along = np.concatenate([before[row], np.asarray(x)[row, at].T], axis=1)
        np.testing.assert_array_equal(states[row, token], along[:, -held:])


def test_a_tree_without_branches_matches_the_plain_step():
    plain, last = gated_delta_rule(**DELTA, initial_state=STATE, return_state=True, use_chunked=False)
    output, states = gated_delta_rule(**DELTA, initial_state=STATE, return_state=True, parents=CHAIN)
    np.testing.assert_allclose(output, plain, atol=2e-6)
    np.testing.assert_allclose(states[:, -1], last, atol=2e-6)
    x, weight, before = normal(ROWS, TOKENS, 5), normal(5, 4), normal(ROWS, 5, 3)
    call = functools.partial(causal_conv1d, x, weight, initial_state=before, return_state=True)
    (plain, last), (output, states) = call(), call(parents=CHAIN)
    np.testing.assert_allclose(output, plain, atol=2e-6)
    np.testing.assert_array_equal(states[:, -1], last)


def test_padding_of_a_convolution_brings_no_gradient_of_an_unused_state():
    x, weight = normal(1, 4, 5), normal(5, 4)
    before = normal(2, 5, 3).at[0].set(jnp.nan)  # the first request is empty, the last token is padding
    packed = {"cu_seqlens": jnp.array([0, 0, 3]), "parents": jnp.array([[-1, 0, 0, -1]])}

    def total(weight):
        return jnp.sum(causal_conv1d(x, weight, initial_state=before, **packed, return_state=True)[0])

    assert jnp.all(jnp.isfinite(jax.grad(total)(weight)))


def packed_calls():
    """Packed trees of three requests, one of them empty and one without a slot, and the same tokens as rows."""
    starts, indices = jnp.array([0, 4, 4, 6]), jnp.array([2, 0, -1])
    parents = jnp.array([-1, 0, 0, 1, -1, -1, 3])  # the last token belongs to no request
    tokens = {name: x[0] for name, x in DELTA.items()}
    slots = normal(4, HEADS, SIZE, SIZE)
    return tokens, slots, starts, indices, parents


def test_slots_are_read_and_stay_until_tokens_are_accepted():
    tokens, slots, starts, indices, parents = packed_calls()
    output, states = ragged_gated_delta_rule(**tokens, **held(slots, starts, indices), parents=parents)
    for first, count, state in ((0, 4, slots[2:3]), (4, 2, jnp.zeros_like(slots[:1]))):
        of = slice(first, first + count)
        fields = {name: x[None, of] for name, x in tokens.items()}
        alone, after = gated_delta_rule(**fields, initial_state=state, parents=parents[None, of], return_state=True)
        np.testing.assert_allclose(output[of], alone[0], atol=1e-6)
        np.testing.assert_allclose(states[of], after[0], atol=1e-6)
    assert not output[6:].any()
    assert not states[6:].any()
    accepted = ragged.accept_states(slots, states, jnp.array([3, 0, 1]), starts, indices)
    np.testing.assert_array_equal(accepted, slots.at[2].set(states[3]))
    np.testing.assert_array_equal(ragged.accept_states(slots, states, jnp.array([-1, -1, -1]), starts, indices), slots)


def held(slots, starts, indices):
    return {"recurrent_state": slots, "query_start_loc": starts, "state_indices": indices}


def test_packed_mamba_2_has_a_state_for_every_token():
    tokens, slots, starts, indices, parents = packed_calls()
    arrays = {"x": tokens["value"], "B": tokens["key"], "C": tokens["query"], "dt": tokens["beta"]}
    weights = {"A": -jnp.ones(HEADS), "D": jnp.ones(HEADS)}
    output, states = ragged.ragged_state_space_v2(**arrays, **weights, **held(slots, starts, indices), parents=parents)
    assert states.shape == (TOKENS, HEADS, SIZE, SIZE)
    first = {name: x[None, :4] for name, x in arrays.items()}
    alone, after, _ = state_space_v2(**first, **weights, initial_state=slots[2:3], parents=parents[None, :4])
    np.testing.assert_allclose(output[:4], alone[0], atol=1e-6)
    np.testing.assert_allclose(states[:4], after[0], atol=1e-6)


def packed_operations():
    """The operations over slots, without the arguments that have states or trees."""
    tokens = packed_calls()[0]
    linear = {name: tokens[name] for name in ("query", "key", "value")}
    mamba = {"x": tokens["value"], "B": tokens["key"], "C": tokens["query"], "dt": tokens["beta"]}
    return {
        "gated delta": (ragged_gated_delta_rule, tokens, {}),
        "mamba-2": (ragged.ragged_state_space_v2, mamba, {"A": -jnp.ones(HEADS), "D": jnp.ones(HEADS)}),
        "gla": (ragged.ragged_gated_linear_attention, {**linear, "g": tokens["decay"]}, {}),
        "lightning": (ragged.ragged_lightning_attention, linear, {"layer_idx": 1, "num_layers": 4}),
    }


@pytest.mark.parametrize("name", ["gated delta", "mamba-2", "gla", "lightning"])
def test_accepted_tokens_processed_again_leave_the_accepted_states(name):
    (operation, tokens, options), (_, slots, starts, indices, parents) = packed_operations()[name], packed_calls()
    held_slots = held(slots, starts, indices)
    output, states = operation(**tokens, **options, **held_slots, parents=parents)
    alone, unchanged = operation(**tokens, **options, **held_slots, parents=parents, return_token_states=False)
    np.testing.assert_array_equal(alone, output)
    np.testing.assert_array_equal(unchanged, slots)
    accepted = jnp.array([3, 0, 1])
    listed, lengths = ragged.accepted_tokens(parents, accepted, starts)
    again = {name: x[listed] for name, x in tokens.items()}
    _, stored = operation(**again, **options, **held(slots, lengths, indices))
    np.testing.assert_allclose(
        stored, ragged.accept_states(slots, states, accepted, starts, indices), rtol=1e-5, atol=1e-6
    )


def test_accepted_tokens_are_the_paths_of_random_trees():
    lengths = np.array([0, *RANDOM.integers(0, 6, 7)])
    starts = np.cumsum([2, *lengths])  # two padding tokens come first
    trees = (np.array([RANDOM.integers(-1, t) for t in range(n)], int) for n in lengths)
    parents = np.concatenate([[0, 0], *trees, [5]])
    accepted = np.array([RANDOM.integers(-1, n + 1) for n in lengths])
    tokens, bounds = ragged.accepted_tokens(*(jnp.asarray(x, jnp.int32) for x in (parents, accepted, starts)))
    for n, (first, count) in enumerate(zip(starts, lengths, strict=False)):
        expected = path(parents[first : first + count], accepted[n]) if accepted[n] < count else []
        np.testing.assert_array_equal(tokens[bounds[n] : bounds[n + 1]], first + np.array(expected, int))


def test_a_call_without_trees_returns_its_states():
    tokens, slots, starts, indices, _ = packed_calls()
    with pytest.raises(ValueError, match="return_token_states: got False without parents"):
        ragged_gated_delta_rule(**tokens, **held(slots, starts, indices), return_token_states=False)
    query = tokens["query"]
    with pytest.raises(ValueError, match="return_token_states: got False without parents"):
        ragged.ragged_gated_linear_attention(
            query, query, query, None, **held(slots, starts, indices), return_token_states=False
        )
    with pytest.raises(ValueError, match="parents: got a value with reverse=True"):
        lightning_attention(QUERY, KEY, VALUE, slopes=jnp.ones(HEADS), parents=PARENTS, reverse=True)


@pytest.mark.parametrize(
    ("parents", "options", "message"),
    [
        (CHAIN + 1, {}, "(?s)parents: got .* wants for every token the index of an earlier token"),
        (CHAIN - 1, {}, "(?s)parents: got .* or -1 for the request's state"),
        (CHAIN[:, :3], {}, r"parents: got shape \(2, 3\), wants \[B=2, T=7\]"),
        (CHAIN.astype(np.float32), {}, "parents: got dtype float32, wants an integer dtype"),
        (CHAIN, {"seg_ids": np.zeros((ROWS, TOKENS), np.int32)}, "parents: got a value with seg_ids"),
    ],
)
def test_parents_that_are_no_tree_are_refused(parents, options, message):
    with pytest.raises(ValueError, match=message):
        gated_delta_rule(**DELTA, parents=parents, **options)


def test_a_parent_in_another_request_is_refused():
    tokens, slots, starts, indices, parents = packed_calls()
    with pytest.raises(ValueError, match="parents: got"):
        ragged_gated_delta_rule(**tokens, **held(slots, starts, indices), parents=parents.at[5].set(1))


def split_delta(tokens):
    fields = {name: x[:, :6] for name, x in DELTA.items()}
    return gated_delta_rule(**fields, parents=CHAIN[:, :6], in_specs=(tokens,) * 5, **split(tokens))


def split_convolution(tokens):
    specs = (tokens, jax.P())
    return causal_conv1d(QUERY[:, :6, 0], normal(SIZE, 4), parents=CHAIN[:, :6], in_specs=specs, **split(tokens))


def split(tokens):
    return {"mesh": jax.make_mesh((2,), ("x",)), "out_specs": tokens}


@pytest.mark.parametrize("call", [split_delta, split_convolution])
def test_tokens_of_trees_are_not_split_over_devices(call):
    with pytest.raises(ValueError, match="split"):
        call(jax.P(None, "x"))
