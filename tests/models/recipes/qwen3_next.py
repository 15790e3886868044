"""Qwen3-Next's gated delta rule: more value heads than key heads, a gate per value head."""

import jax
import jax.numpy as jnp
from tests.models.recipes.common import rms_norm
from tests.models.recipes.shared.recurrent import functions_of

from ejkernel.modules import causal_conv1d, gated_delta_rule, kda_decay

SOURCE = "qwen3_next.Qwen3NextGatedDeltaNet"
KEY_HEADS, VALUE_HEADS, DIM, TAPS = 2, 4, 8, 4
PER_KEY = VALUE_HEADS // KEY_HEADS


def mix(w, x, conv_state=None, state=None, cu_seqlens=None):
    """The layer over tokens that follow the given states: (output, new convolution state, new state)."""
    lead = x.shape[:2]
    fused = (x @ w["in_proj_qkvz.weight"].T).reshape(*lead, KEY_HEADS, -1)  # of each key head: q, k, its values, z
    *qkv, z = jnp.split(fused, [DIM, 2 * DIM, 2 * DIM + PER_KEY * DIM], axis=-1)
    b, a = jnp.split((x @ w["in_proj_ba.weight"].T).reshape(*lead, KEY_HEADS, -1), 2, axis=-1)
    hidden = jnp.concatenate([part.reshape(*lead, -1) for part in qkv], axis=-1)
    taps = w["conv1d.weight"][:, 0]
    hidden, conv_state = causal_conv1d(hidden, taps, None, conv_state, cu_seqlens, activation="silu", return_state=True)
    split = jnp.split(hidden, [KEY_HEADS * DIM, 2 * KEY_HEADS * DIM], axis=-1)
    query, key, value = (part.reshape(*lead, -1, DIM) for part in split)
    output, state = gated_delta_rule(
        query,
        key,
        value,
        jax.nn.sigmoid(b).reshape(*lead, VALUE_HEADS),
        kda_decay(a.reshape(*lead, VALUE_HEADS), w["A_log"], w["dt_bias"]),
        None,
        state,
        cu_seqlens=cu_seqlens,
        return_state=True,
    )
    output = rms_norm(output, w["norm.weight"]) * jax.nn.silu(z.reshape(*lead, VALUE_HEADS, DIM))
    return output.reshape(*lead, -1) @ w["out_proj.weight"].T, conv_state, state


prefill, packed, decode = functions_of(mix)


def empty_cache(batch, tokens):
    channels = (2 * KEY_HEADS + VALUE_HEADS) * DIM
    return jnp.zeros((batch, channels, TAPS - 1)), jnp.zeros((batch, VALUE_HEADS, DIM, DIM))
