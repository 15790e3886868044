"""Step sizes that `state_space_v1` and `state_space_v2` make of a raw dt, and the norm after the gate."""

import jax
import jax.numpy as jnp
import linear_recurrence_loop
import numpy as np
import pytest
import selective_scan_loop

from ejkernel.modules import state_space_v1, state_space_v2

LIMITS = (0.3, 1.5)
SMALL = dict(rtol=2e-5, atol=2e-5)


def steps(dt: np.ndarray, bias: np.ndarray, limits: tuple[float, float]) -> np.ndarray:
    """The formula, in float64."""
    return np.clip(np.logaddexp(0, np.asarray(dt, np.float64) + np.asarray(bias)), *limits)


def second(tokens: int = 7) -> dict[str, jax.Array]:
    """Arrays of `state_space_v2`: 4 heads of 6 channels in 2 groups, 5 states."""
    keys = jax.random.split(jax.random.key(0), 6)
    return {
        "x": jax.random.normal(keys[0], (1, tokens, 4, 6)),
        "A": -jnp.arange(1.0, 5.0) / 4,
        "B": jax.random.normal(keys[1], (1, tokens, 2, 5)),
        "C": jax.random.normal(keys[2], (1, tokens, 2, 5)),
        "D": jnp.arange(4.0),
        "dt": jax.random.normal(keys[3], (1, tokens, 4)),
    }


def first(tokens: int = 7) -> dict[str, jax.Array]:
    """Arrays of `state_space_v1`: 6 channels, 5 states."""
    keys = jax.random.split(jax.random.key(1), 6)
    return {
        "hidden_states": jax.random.normal(keys[0], (1, tokens, 6)),
        "A": -jnp.exp(jax.random.normal(keys[1], (6, 5))),
        "B": jax.random.normal(keys[2], (1, tokens, 5)),
        "C": jax.random.normal(keys[3], (1, tokens, 5)),
        "D": jnp.arange(6.0),
        "dt": jax.random.normal(keys[4], (1, tokens, 6)),
    }


CALLS = {
    "v1": (state_space_v1, first, 6, selective_scan_loop.state_space_v1),
    "v2": (state_space_v2, second, 4, linear_recurrence_loop.state_space),
}


@pytest.mark.parametrize("which", CALLS)
def test_raw_steps_are_a_clipped_softplus(which: str) -> None:
    function, make, width, loop = CALLS[which]
    arrays, bias = make(), jnp.linspace(-1.0, 1.0, width)
    got, state, _ = function(**arrays, dt_bias=bias, dt_softplus=True, dt_limit=LIMITS)
    plain = {name: np.asarray(x, np.float64) for name, x in arrays.items()}
    want, last = loop(**plain | {"dt": steps(arrays["dt"], bias, LIMITS)})
    np.testing.assert_allclose(got, want, **SMALL)
    np.testing.assert_allclose(state, last, **SMALL)


@pytest.mark.parametrize("which", CALLS)
def test_a_layer_may_have_no_skip_connection(which: str) -> None:
    function, make, *_ = CALLS[which]
    arrays = make()
    got = function(**arrays | {"D": None})[0]
    np.testing.assert_allclose(got, function(**arrays | {"D": jnp.zeros_like(arrays["D"])})[0], **SMALL)


@pytest.mark.parametrize("which", CALLS)
def test_gradients_pass_through_the_steps(which: str) -> None:
    function, make, width, _ = CALLS[which]
    arrays, bias = make(), jnp.linspace(-1.0, 1.0, width)

    def in_call(dt: jax.Array, bias: jax.Array) -> jax.Array:
        return jnp.sum(function(**arrays | {"dt": dt}, dt_bias=bias, dt_softplus=True, dt_limit=LIMITS)[0] ** 2)

    def before(dt: jax.Array, bias: jax.Array) -> jax.Array:
        return jnp.sum(function(**arrays | {"dt": jnp.clip(jax.nn.softplus(dt + bias), *LIMITS)})[0] ** 2)

    got, want = (jax.grad(loss, argnums=(0, 1))(arrays["dt"], bias) for loss in (in_call, before))
    for one, other in zip(got, want, strict=True):
        assert np.any(np.asarray(other) != 0)
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("which", CALLS)
def test_tokens_of_no_sequence_do_not_reach_the_gradient_of_the_bias(which: str) -> None:
    function, make, width, _ = CALLS[which]
    arrays, bias = make(), jnp.linspace(-1.0, 1.0, width)
    starts = jnp.array([0, 2, 5], jnp.int32)

    def loss(bias: jax.Array, dt: jax.Array) -> jax.Array:
        return jnp.sum(function(**arrays | {"dt": dt}, dt_bias=bias, dt_softplus=True, cu_seqlens=starts)[0][:, :5])

    want, got = (jax.grad(loss)(bias, arrays["dt"].at[:, 5:].set(rest)) for rest in (0.0, jnp.nan))
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("limit", [(0.5, 0.5), (-1.0, 1.0), (2.0,), 3.0, (float("inf"), float("inf")), ("0", "1")])
@pytest.mark.parametrize("which", CALLS)
def test_dt_limit_is_two_numbers_in_order(which: str, limit: object) -> None:
    function, make, *_ = CALLS[which]
    with pytest.raises(ValueError, match="dt_limit: got"):
        function(**make(), dt_limit=limit)


@pytest.mark.parametrize("which", CALLS)
def test_dt_bias_has_the_width_of_dt(which: str) -> None:
    function, make, width, _ = CALLS[which]
    with pytest.raises(ValueError, match="dt_bias: got shape"):
        function(**make(), dt_bias=jnp.zeros(width + 1))


@pytest.mark.parametrize("before", [True, False])
def test_a_norm_in_groups_before_or_after_the_gate(before: bool) -> None:
    arrays = second()
    gate = jax.random.normal(jax.random.key(9), (1, 7, 24))
    options = {"use_gated_rmsnorm": True, "norm_before_gate": before, "norm_group_size": 12, "rmsnorm_eps": 1e-3}
    got = state_space_v2(**arrays, gate=gate, **options)[0]

    def norm(y: np.ndarray) -> np.ndarray:
        groups = y.reshape(1, 7, 2, 12)
        return (groups / np.sqrt((groups**2).mean(-1, keepdims=True) + 1e-3)).reshape(y.shape)

    y, silu = (np.asarray(x, np.float64) for x in (state_space_v2(**arrays)[0], jax.nn.silu(gate)))
    np.testing.assert_allclose(got, norm(y) * silu if before else norm(y * silu), **SMALL)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"norm_before_gate": False}, "norm_before_gate: got False without a norm"),
        ({"norm_group_size": 12}, "norm_group_size: got 12 without a norm"),
        (
            {"use_gated_rmsnorm": True, "norm_group_size": 7},
            "norm_group_size: got 7, wants a divisor of the 24 channels",
        ),
    ],
)
def test_norm_options_need_a_norm_and_groups_that_fit(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        state_space_v2(**second(), gate=jnp.zeros((1, 7, 24)), **options)
