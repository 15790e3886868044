"""Jamba: Mamba with norms of the step sizes, B and C."""

import jax.numpy as jnp
from tests.models.recipes.common import rms_norm

from ejkernel.modules import causal_conv1d, state_space_v1

SOURCE = "jamba.JambaMambaMixer"
CHANNELS, STATES, RANK, TAPS = 32, 4, 3, 4


def mix(w, x, conv_state=None, state=None, cu_seqlens=None):
    """The layer over tokens that follow the given states: (output, new convolution state, new state)."""
    hidden, gate = jnp.split(x @ w["in_proj.weight"].T, 2, axis=-1)
    taps, bias = w["conv1d.weight"][:, 0], w["conv1d.bias"]
    hidden, conv_state = causal_conv1d(hidden, taps, bias, conv_state, cu_seqlens, activation="silu", return_state=True)
    split = jnp.split(hidden @ w["x_proj.weight"].T, [RANK, RANK + STATES], axis=-1)
    names = ("dt_layernorm", "b_layernorm", "c_layernorm")
    dt, write, read = (rms_norm(piece, w[f"{name}.weight"]) for piece, name in zip(split, names, strict=True))
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


def prefill(w, x):
    return mix(w, x)[0]


def packed(w, x, cu_seqlens):
    return mix(w, x, cu_seqlens=cu_seqlens)[0]


def empty_cache(batch, tokens):
    return jnp.zeros((batch, CHANNELS, TAPS - 1)), jnp.zeros((batch, CHANNELS, STATES))


def decode(w, x, cache, position):
    output, *cache = mix(w, x, *cache)
    return output, tuple(cache)
