"""Mamba's mixer: a short convolution and a selective scan. Models differ in norms of the step sizes, B and C."""

import jax.numpy as jnp

from ejkernel.modules import causal_conv1d, state_space_v1

CHANNELS, STATES, RANK, TAPS = 32, 4, 3, 4


def mix(w, x, conv_state=None, state=None, cu_seqlens=None, normalise=None):
    """The layer over tokens that follow the given states: (output, new convolution state, new state).

    `normalise` maps the step sizes (before their projection), B and C to their normalised values; None keeps them.
    """
    hidden, gate = jnp.split(x @ w["in_proj.weight"].T, 2, axis=-1)
    taps, bias = w["conv1d.weight"][:, 0], w["conv1d.bias"]
    hidden, conv_state = causal_conv1d(hidden, taps, bias, conv_state, cu_seqlens, activation="silu", return_state=True)
    split = jnp.split(hidden @ w["x_proj.weight"].T, [RANK, RANK + STATES], axis=-1)
    dt, write, read = split if normalise is None else normalise(w, *split)
    output, state, _ = state_space_v1(
        hidden,
        -jnp.exp(w["A_log"]),
        write,
        read,
        w["D"],
        dt @ w["dt_proj.weight"].T,
        gate,
        state,
        cu_seqlens=cu_seqlens,
        dt_bias=w["dt_proj.bias"],
        dt_softplus=True,
    )
    return output @ w["out_proj.weight"].T, conv_state, state


def empty_cache(batch, tokens):
    return jnp.zeros((batch, CHANNELS, TAPS - 1)), jnp.zeros((batch, CHANNELS, STATES))
