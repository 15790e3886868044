"""Bamba: Mamba-2 with one norm of all channels after the gate."""

import jax.numpy as jnp

from ejkernel.modules import causal_conv1d, state_space_v2

SOURCE = "bamba.BambaMixer"
CHANNELS, HEADS, GROUPS, STATES, TAPS = 32, 4, 1, 4, 4


def mix(w, x, conv_state=None, state=None, cu_seqlens=None):
    """The layer over tokens that follow the given states: (output, new convolution state, new state)."""
    gate, hidden, dt = jnp.split(x @ w["in_proj.weight"].T, [CHANNELS, 2 * CHANNELS + 2 * GROUPS * STATES], axis=-1)
    taps, bias = w["conv1d.weight"][:, 0], w["conv1d.bias"]
    hidden, conv_state = causal_conv1d(hidden, taps, bias, conv_state, cu_seqlens, activation="silu", return_state=True)
    hidden, write, read = jnp.split(hidden, [CHANNELS, CHANNELS + GROUPS * STATES], axis=-1)
    hidden = hidden.reshape(*x.shape[:2], HEADS, -1)
    write, read = (piece.reshape(*x.shape[:2], GROUPS, STATES) for piece in (write, read))
    output, state, _ = state_space_v2(
        hidden,
        -jnp.exp(w["A_log"]),
        write,
        read,
        w["D"],
        dt,
        gate,
        state,
        cu_seqlens=cu_seqlens,
        dt_bias=w["dt_bias"],
        dt_softplus=True,
        use_gated_rmsnorm=True,
        norm_before_gate=False,
        norm_group_size=CHANNELS // GROUPS,
    )
    return (output * w["norm.weight"]) @ w["out_proj.weight"].T, conv_state, state


def prefill(w, x):
    return mix(w, x)[0]


def packed(w, x, cu_seqlens):
    return mix(w, x, cu_seqlens=cu_seqlens)[0]


def empty_cache(batch, tokens):
    channels = CHANNELS + 2 * GROUPS * STATES
    return jnp.zeros((batch, channels, TAPS - 1)), jnp.zeros((batch, HEADS, CHANNELS // HEADS, STATES))


def decode(w, x, cache, position):
    output, *cache = mix(w, x, *cache)
    return output, tuple(cache)
