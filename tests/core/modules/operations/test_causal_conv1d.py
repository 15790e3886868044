"""`causal_conv1d`: what it computes and promises, and what it refuses."""

import causal_convolution_loop as loop
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import transformed

from ejkernel.modules import CausalConv1d, causal_conv1d, create_default_executor
from ejkernel.modules.operations.causal_conv1d import OP, CausalConv1dArguments

# rows, tokens, channels, weights, optional arrays, activation
CALLS = {
    "plain": (2, 9, 3, 4, (), None),
    "layer": (2, 9, 3, 4, ("bias",), "silu"),
    "two weights": (1, 5, 2, 2, ("bias", "initial_state"), "silu"),
    "eight weights, fewer tokens": (2, 3, 2, 8, ("initial_state",), "silu"),
    "one token": (2, 1, 3, 4, ("bias", "initial_state"), None),
    "packed": (1, 12, 3, 4, ("bias", "cu_seqlens"), "silu"),
    "packed with states": (1, 12, 2, 5, ("initial_state", "cu_seqlens"), "silu"),
}
BOUNDS = np.array([0, 1, 1, 7, 9], np.int32)  # an empty sequence, and tokens of none behind the last


def make(rows, tokens, channels, width, optional=(), activation=None, dtype=np.float64):
    """Arrays of a call by argument name."""
    rng = np.random.default_rng(0)
    sequences = len(BOUNDS) - 1 if "cu_seqlens" in optional else rows
    arrays = {
        "x": rng.normal(size=(rows, tokens, channels)),
        "weight": rng.normal(size=(channels, width)),
        "bias": rng.normal(size=channels),
        "initial_state": rng.normal(size=(sequences, channels, width - 1)),
    }
    return {name: x.astype(dtype) for name, x in arrays.items() if name in ("x", "weight", *optional)}


@pytest.mark.parametrize("name", CALLS)
def test_values_and_gradients_match_the_formula(name):
    optional, activation = CALLS[name][4:]
    bounds = {"cu_seqlens": BOUNDS} if "cu_seqlens" in optional else {}
    with jax.enable_x64(True):
        arrays = make(*CALLS[name])
        names, every = list(arrays), range(len(arrays))
        options = {**jax.tree.map(jnp.asarray, bounds), "activation": activation, "return_state": True}

        def call(*values):
            return causal_conv1d(**dict(zip(names, values, strict=True)), **options, platform="xla")

        def meaning(*values):
            return OP.reference(CausalConv1dArguments(**dict(zip(names, values, strict=True)), **options))

        values = [jnp.asarray(x) for x in arrays.values()]
        got = transformed.quickly(transformed.graded(call, every))(*values)
        transformed.close(got[0], loop.causal_conv1d(**arrays, **bounds, activation=activation), 1e-12, 1e-12)
        transformed.close(got, transformed.quickly(transformed.graded(meaning, every))(*values), 1e-11, 1e-11)
        transformed.check_finite_differences(call, values, every)


def test_a_prompt_and_then_single_tokens_match_one_call():
    arrays = {name: jnp.asarray(x) for name, x in make(2, 10, 3, 4, ("bias",), dtype=np.float32).items()}
    x = arrays.pop("x")
    whole, behind = causal_conv1d(x, **arrays, activation="silu", return_state=True)
    output, state = causal_conv1d(x[:, :6], **arrays, activation="silu", return_state=True)
    parts = [output]
    for t in range(6, 10):
        output, state = causal_conv1d(
            x[:, t : t + 1], **arrays, initial_state=state, activation="silu", return_state=True
        )
        parts.append(output)
    np.testing.assert_allclose(jnp.concatenate(parts, axis=1), whole, atol=1e-6)
    np.testing.assert_array_equal(state, behind)


def test_a_state_is_a_copy_in_the_inputs_dtype():
    x = jax.random.normal(jax.random.key(0), (1, 8, 4), jnp.bfloat16)
    output, state = causal_conv1d(x, jnp.ones((4, 4)), return_state=True)
    assert output.dtype == state.dtype == jnp.bfloat16
    np.testing.assert_array_equal(state, jnp.swapaxes(x[:, -3:], 1, 2))


SLOTS = np.array([5, -1, 2, 0], np.int32)


@pytest.mark.parametrize("held", [3, 4], ids=["W - 1 tokens", "W tokens"])
@pytest.mark.parametrize("name", ["packed", "rows", "one token"])
def test_states_in_slots_are_read_and_stored_by_the_loop(name, held):
    packed = name == "packed"
    rng = np.random.default_rng(1)
    x = rng.normal(size=(1, 12, 3) if packed else (4, 1 if name == "one token" else 6, 3))
    weight, slots = rng.normal(size=(3, 4)), rng.normal(size=(6, 3, held))
    bounds = {"cu_seqlens": BOUNDS} if packed else {}
    lengths = np.diff(BOUNDS) if packed else np.full(4, x.shape[1])
    state = np.where((SLOTS >= 0)[:, None, None], slots[SLOTS], 0)
    want, final = loop.causal_conv1d(x, weight, initial_state=state[..., -3:], **bounds)
    stored = slots.copy()
    for n, slot in enumerate(SLOTS):
        if slot < 0 or not lengths[n]:
            continue
        tokens = x[0, BOUNDS[n] : BOUNDS[n + 1]] if packed else x[n]
        stored[slot] = np.concatenate([state[n], tokens.T], axis=1)[:, -held:]
        np.testing.assert_array_equal(stored[slot][:, -3:], final[n])
    with jax.enable_x64(True):
        given = {"initial_state": jnp.asarray(slots), "state_indices": jnp.asarray(SLOTS), **bounds}
        got = jax.jit(lambda **x: causal_conv1d(return_state=True, **x))(x=x, weight=weight, **given)
    transformed.close(got, (want, stored), 1e-12, 1e-12)


def test_a_state_of_w_tokens_stays_one():
    arrays = make(2, 5, 3, 4, dtype=np.float32)
    long = jax.random.normal(jax.random.key(1), (2, 3, 4))
    output, state = causal_conv1d(**arrays, initial_state=long, return_state=True)
    np.testing.assert_array_equal(state, jnp.swapaxes(arrays["x"][:, -4:], 1, 2))
    np.testing.assert_array_equal(output, causal_conv1d(**arrays, initial_state=long[..., 1:]))


def test_slots_have_gradients():
    arrays = {"x": jnp.ones((2, 1, 3)), "weight": jnp.ones((3, 4)), "state_indices": jnp.array([4, 1])}
    gradient = jax.grad(lambda slots: jnp.sum(causal_conv1d(initial_state=slots, **arrays)))(jnp.ones((5, 3, 3)))
    assert (np.flatnonzero(np.abs(gradient).sum((1, 2))) == [1, 4]).all()


def test_rows_in_slots_are_not_split_over_devices():
    mesh = jax.make_mesh((2,), ("dp",), (jax.sharding.AxisType.Auto,), devices=jax.devices()[:2])
    spec = jax.sharding.PartitionSpec("dp")
    given = {"initial_state": jnp.ones((5, 3, 3)), "state_indices": jnp.array([4, 1]), "return_state": True}
    with pytest.raises(ValueError, match="cannot be split"):
        causal_conv1d(X, WEIGHT, **given, mesh=mesh, in_specs=(spec, None, None), out_specs=(spec, None))


def test_the_kernel_object_computes_what_the_function_does():
    x, weight = jnp.ones((1, 5, 2)), jnp.ones((2, 3))
    np.testing.assert_array_equal(create_default_executor()(CausalConv1d(), x, weight), causal_conv1d(x, weight))


X, WEIGHT = jnp.ones((2, 5, 3)), jnp.ones((3, 4))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"x": jnp.ones((5, 3))}, r"x: got shape \(5, 3\), wants \[B, T, I\]"),
        ({"x": jnp.ones((2, 5, 3), jnp.int32)}, "x: got dtype int32, wants a floating dtype"),
        ({"x": jnp.ones((2, 0, 3))}, "wants T of at least 1|wants T and I"),
        ({"weight": jnp.ones((4, 4))}, r"weight: got shape \(4, 4\), wants \[I=3, W\]"),
        ({"weight": jnp.ones((3, 1))}, r"weight: got shape \(3, 1\), wants \[I, W\] with W from 2 to 8"),
        ({"weight": jnp.ones((3, 9))}, "W from 2 to 8"),
        ({"bias": jnp.ones(4)}, r"bias: got shape \(4,\), wants \[I=3\]"),
        ({"initial_state": jnp.ones((2, 3, 5))}, r"initial_state: got shape \(2, 3, 5\), wants \[B=2, I=3, W-1=3\]"),
        ({"state_indices": jnp.array([0, 1])}, "state_indices: got a value without initial_state"),
        ({"state_indices": jnp.array([0]), "initial_state": jnp.ones((4, 3, 3))}, r"state_indices: got shape \(1,\)"),
        ({"state_indices": jnp.array([2, 2]), "initial_state": jnp.ones((4, 3, 3))}, "wants different slots"),
        ({"cu_seqlens": jnp.array([0, 5])}, "cu_seqlens: got a value with 2 rows"),
        ({"activation": "gelu"}, "activation: got str 'gelu', wants None or 'silu'"),
        ({"return_state": 1}, "return_state: got int 1, wants True or False"),
    ],
)
def test_wrong_arguments_are_refused_by_name(arguments, message):
    with pytest.raises(ValueError, match=message):
        causal_conv1d(**{"x": X, "weight": WEIGHT, **arguments})
