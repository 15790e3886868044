"""Mamba-2's mixer: heads with a scalar gate, and a norm in groups. Models differ in the norm and in the step sizes."""

import jax.numpy as jnp

from ejkernel.modules import causal_conv1d, state_space_v2

CHANNELS, HEADS, STATES, TAPS = 32, 4, 4, 4


def mix(w, x, conv_state=None, state=None, cu_seqlens=None, *, groups=2, multipliers=1.0, **terms):
    """The layer over tokens that follow the given states: (output, new convolution state, new state).

    Args:
        w, x, conv_state, state, cu_seqlens: The weights, the tokens, the states before them, and packed sequences.
        groups: How many pairs of B and C there are.
        multipliers: Factors on the columns of the first projection.
        **terms: The arguments of `state_space_v2` that the model has: `norm_before_gate`, `dt_limit`.
    """
    projected = x @ w["in_proj.weight"].T * multipliers
    gate, hidden, dt = jnp.split(projected, [CHANNELS, 2 * CHANNELS + 2 * groups * STATES], axis=-1)
    taps, bias = w["conv1d.weight"][:, 0], w["conv1d.bias"]
    hidden, conv_state = causal_conv1d(hidden, taps, bias, conv_state, cu_seqlens, activation="silu", return_state=True)
    hidden, write, read = jnp.split(hidden, [CHANNELS, CHANNELS + groups * STATES], axis=-1)
    output, state, _ = state_space_v2(
        hidden.reshape(*x.shape[:2], HEADS, -1),
        -jnp.exp(w["A_log"]),
        write.reshape(*x.shape[:2], groups, STATES),
        read.reshape(*x.shape[:2], groups, STATES),
        w["D"],
        dt,
        gate,
        state,
        cu_seqlens=cu_seqlens,
        dt_bias=w["dt_bias"],
        dt_softplus=True,
        use_gated_rmsnorm=True,
        norm_group_size=CHANNELS // groups,
        **terms,
    )
    return (output * w["norm.weight"]) @ w["out_proj.weight"].T, conv_state, state


def empty_cache(batch, tokens, groups=2):
    channels = CHANNELS + 2 * groups * STATES
    return jnp.zeros((batch, channels, TAPS - 1)), jnp.zeros((batch, HEADS, CHANNELS // HEADS, STATES))
