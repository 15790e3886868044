"""RWKV-4: the average of earlier values, with each token mixed with the one before."""

import jax
import jax.numpy as jnp
from tests.models.recipes.shared.recurrent import functions_of

from ejkernel.modules import rwkv4

SOURCE = "rwkv.RwkvSelfAttention"
WIDTH, CHANNELS = 16, 24


def mix(w, x, last=None, state=None):
    """The layer over tokens that follow the given one and the given state: (output, last token, new state)."""
    last = jnp.zeros_like(x[:, 0]) if last is None else last
    before = jnp.concatenate([last[:, None], x[:, :-1]], axis=1)

    def project(name):
        share = w[f"time_mix_{name}"]
        return (x * share + before * (1 - share)) @ w[f"{name}.weight"].T

    key, value = project("key"), project("value")
    average, state = rwkv4(w["time_decay"], w["time_first"], key, value, state, return_state=True)
    return (jax.nn.sigmoid(project("receptance")) * average) @ w["output.weight"].T, x[:, -1], state


prefill, _, decode = functions_of(mix)


def empty_cache(batch, tokens):
    sums = jnp.zeros((batch, 2, CHANNELS))
    return jnp.zeros((batch, WIDTH)), jnp.concatenate([sums, jnp.full((batch, 1, CHANNELS), -1e30)], axis=1)
