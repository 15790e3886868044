"""LFM2: a short convolution between two gates."""

import jax.numpy as jnp
from tests.models.recipes.shared.recurrent import functions_of

from ejkernel.modules import causal_conv1d

SOURCE = "lfm2.Lfm2ShortConv"
WIDTH, TAPS = 16, 3


def mix(w, x, state=None, cu_seqlens=None):
    """The layer over tokens that follow the given state: (output, new state)."""
    before, after, hidden = jnp.split(x @ w["in_proj.weight"].T, 3, axis=-1)
    hidden, state = causal_conv1d(before * hidden, w["conv.weight"][:, 0], None, state, cu_seqlens, return_state=True)
    return (after * hidden) @ w["out_proj.weight"].T, state


prefill, packed, decode = functions_of(mix)


def empty_cache(batch, tokens):
    return (jnp.zeros((batch, WIDTH, TAPS - 1)),)
