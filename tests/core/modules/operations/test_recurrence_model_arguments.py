"""Value heads that share keys, segments, packed sequences, a scale and slopes in the recurrences."""

import itertools

import jax
import jax.numpy as jnp
import linear_recurrence_loop as loop
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from ejkernel.modules import (
    gated_delta_rule,
    gla_attention,
    kernel_delta_attention,
    lightning_attention,
    ragged_gated_delta_rule,
)

SMALL = dict(rtol=3e-5, atol=3e-5)
STARTS = np.array([0, 4, 4, 9], np.int32)
IDS = np.array([[3, 3, -1, 3, 5, 5, 5, -1, 2, 2, -1], [-1, 0, 0, 0, 7, -1, 7, 7, 7, 1, 1]], np.int32)
DELTA = {"gated": gated_delta_rule, "kernel": kernel_delta_attention}


def tokens(rows: int, query: int, key: int, value: int, states: int | None = None) -> dict[str, jax.Array]:
    """Arrays of a delta rule of 11 tokens, 5 key and 3 value channels, with these numbers of heads."""
    keys = jax.random.split(jax.random.key(query + 10 * value), 6)
    heads = max(query, value)
    return {
        "query": jax.random.normal(keys[0], (rows, 11, query, 5)),
        "key": jax.random.normal(keys[1], (rows, 11, key, 5)),
        "value": jax.random.normal(keys[2], (rows, 11, value, 3)),
        "beta": jax.random.uniform(keys[3], (rows, 11, heads)),
        "decay": -jax.random.uniform(keys[4], (rows, 11, heads)),
        "initial_state": jax.random.normal(keys[5], (states or rows, heads, 5, 3)),
    }


def repeated(arrays: dict[str, jax.Array]) -> dict[str, np.ndarray]:
    """The same call with as many query and key heads as value heads, in float64."""
    heads = arrays["beta"].shape[-1]
    every = {name: np.asarray(x, np.float64) for name, x in arrays.items()}
    for name in ("query", "key", "value"):
        every[name] = np.repeat(every[name], heads // every[name].shape[2], axis=2)
    return every


@pytest.mark.parametrize("which", DELTA)
@pytest.mark.parametrize("heads", [(2, 2, 4), (1, 1, 3)])
def test_value_heads_share_the_queries_and_keys_of_their_group(which: str, heads: tuple[int, int, int]) -> None:
    arrays = tokens(2, *heads)
    output, state = DELTA[which](**arrays, softmax_scale=0.3, return_state=True)
    want, last = loop.delta(**repeated(arrays), softmax_scale=0.3)
    np.testing.assert_allclose(output, want, **SMALL)
    np.testing.assert_allclose(state, last, **SMALL)


def test_gradients_of_shared_queries_and_keys_are_sums_over_their_value_heads() -> None:
    arrays = tokens(1, 2, 2, 4)

    def loss(repeat: bool, **arrays: jax.Array) -> jax.Array:
        if repeat:
            arrays |= {name: jnp.repeat(arrays[name], 2, axis=2) for name in ("query", "key")}
        return jnp.sum(jnp.sin(gated_delta_rule(**arrays)))

    got, want = (jax.grad(lambda given, r=r: loss(r, **given))(arrays) for r in (False, True))
    for name, gradient in want.items():
        np.testing.assert_allclose(got[name], gradient, **SMALL, err_msg=name)


def test_packed_requests_have_more_value_heads_than_key_heads() -> None:
    arrays = {name: x[0] for name, x in tokens(1, 2, 2, 4).items() if name != "initial_state"}
    slots, starts, indices = jnp.ones((3, 4, 5, 3)), jnp.array([0, 6, 11]), jnp.array([2, 0])
    output, kept = ragged_gated_delta_rule(
        *(arrays[name] for name in ("query", "key", "value", "beta", "decay")), slots, starts, indices
    )
    every = {name: np.repeat(x, 2, axis=1) if name in ("query", "key") else x for name, x in arrays.items()}
    want, last = loop.ragged_delta(**every, slots=slots, starts=starts, indices=indices)
    np.testing.assert_allclose(output, want, **SMALL)
    np.testing.assert_allclose(kept, last, **SMALL)


@pytest.mark.parametrize("operation", [gated_delta_rule, ragged_gated_delta_rule])
def test_shared_queries_and_keys_are_split_over_devices_with_their_value_heads(operation) -> None:
    arrays = tokens(1, 2, 2, 4)
    call = [arrays[name] for name in ("query", "key", "value", "beta", "decay")]
    lead = () if operation is ragged_gated_delta_rule else (None,)
    heads = PartitionSpec(*lead, None, "heads")
    specs = (heads,) * 5
    if operation is ragged_gated_delta_rule:
        call = [*(x[0] for x in call), jnp.ones((2, 4, 5, 3)), jnp.array([0, 6, 11]), jnp.array([1, 0])]
        specs = (*specs, heads, None, None)
    mesh = jax.make_mesh((2,), ("heads",), devices=jax.devices()[:2])
    got = operation(*call, mesh=mesh, in_specs=specs, out_specs=heads)
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(operation(*call)), strict=True):
        np.testing.assert_allclose(one, other, **SMALL)


@pytest.mark.parametrize("which", DELTA)
def test_packed_sequences_have_states_of_their_own(which: str) -> None:
    arrays = tokens(1, 2, 2, 2, states=3)
    output, state = DELTA[which](**arrays, cu_seqlens=jnp.asarray(STARTS), return_state=True)
    every = repeated(arrays)
    states = every.pop("initial_state")
    for n, (start, end) in enumerate(itertools.pairwise(STARTS)):
        piece = {name: x[:, start:end] for name, x in every.items()}
        want, last = loop.delta(**piece, initial_state=states[n][None])
        np.testing.assert_allclose(output[:, start:end], want, **SMALL)
        np.testing.assert_allclose(state[n], last[0], **SMALL)
    assert not np.any(output[:, STARTS[-1] :])


def test_segments_of_kernel_delta_attention_start_anew() -> None:
    arrays = tokens(2, 2, 2, 2)
    output = kernel_delta_attention(**arrays, seg_ids=jnp.asarray(IDS))
    np.testing.assert_allclose(output, loop.delta(**repeated(arrays), seg_ids=IDS)[0], **SMALL)


def test_segments_of_gated_linear_attention_start_anew() -> None:
    arrays = tokens(2, 2, 2, 2)
    given = {name: arrays[name] for name in ("query", "key", "value", "initial_state")}
    output = gla_attention(**given, g=arrays["decay"], seg_ids=jnp.asarray(IDS))
    every = repeated(arrays)
    for row in range(2):
        gates = loop.per_channel(every["decay"][row], every["query"][row])
        fields = (every[name][row] for name in ("query", "key", "value"))
        want, _ = loop.run(*fields, gates, 5**-0.5, state=every["initial_state"][row], **loop.segments(IDS[row]))
        np.testing.assert_allclose(output[row], want, **SMALL)


def test_reversed_segments_are_those_of_the_reversed_row() -> None:
    arrays = tokens(2, 2, 2, 2)
    flipped = {name: jnp.flip(arrays[name], 1) for name in ("query", "key", "value", "decay")}
    names = ("query", "key", "value", "decay")
    got = gla_attention(*(arrays[name] for name in names), seg_ids=jnp.asarray(IDS), reverse=True)
    want = gla_attention(*(flipped[name] for name in names), seg_ids=jnp.asarray(IDS[:, ::-1]))
    np.testing.assert_allclose(got, jnp.flip(want, 1), **SMALL)


def test_slopes_of_lightning_attention() -> None:
    arrays = tokens(2, 2, 2, 2)
    given = [arrays[name] for name in ("query", "key", "value")]
    slopes = jnp.array([0.1, 0.7])
    want, _ = loop.recurrent(*(np.asarray(x, np.float64) for x in given), g_gamma=-np.asarray(slopes))
    np.testing.assert_allclose(lightning_attention(*given, slopes=slopes), want, **SMALL)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"slopes": jnp.zeros(2), "layer_idx": 1}, "layer_idx: got 1 with slopes"),
        ({"slopes": jnp.zeros(3)}, r"slopes: got shape \(3,\)"),
        ({}, "layer_idx: got None"),
    ],
)
def test_lightning_attention_wants_slopes_or_a_layer(given: dict, message: str) -> None:
    arrays = tokens(2, 2, 2, 2)
    with pytest.raises(ValueError, match=message):
        lightning_attention(arrays["query"], arrays["key"], arrays["value"], **given)


@pytest.mark.parametrize("which", DELTA)
@pytest.mark.parametrize(
    ("heads", "message"),
    [((2, 2, 3), "key: got shape .* wants a divisor of value's 3"), ((1, 2, 4), "key: got shape")],
)
def test_heads_that_do_not_share_evenly_are_refused(which: str, heads: tuple[int, int, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DELTA[which](**tokens(1, *heads))


@pytest.mark.parametrize("function", [*DELTA.values(), lambda beta, decay, **rest: gla_attention(**rest, g=decay)])
def test_segments_and_packed_sequences_exclude_each_other(function) -> None:
    with pytest.raises(ValueError, match="seg_ids: got a value with cu_seqlens"):
        function(**tokens(1, 2, 2, 2), seg_ids=jnp.asarray(IDS[:1]), cu_seqlens=jnp.asarray(STARTS))
