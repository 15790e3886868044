"""Qwen3.5's gated delta rule: more value heads than key heads, and a projection for each of its inputs."""

import jax
import jax.numpy as jnp
from tests.models.recipes.common import rms_norm
from tests.models.recipes.shared.recurrent import functions_of

from ejkernel.modules import causal_conv1d, gated_delta_rule, kda_decay

SOURCE = "qwen3_5.Qwen3_5GatedDeltaNet"
KEY_HEADS, VALUE_HEADS, DIM, TAPS = 2, 4, 8, 4


def mix(w, x, conv_state=None, state=None, cu_seqlens=None):
    """The layer over tokens that follow the given states: (output, new convolution state, new state)."""
    lead = x.shape[:2]
    hidden, taps = x @ w["in_proj_qkv.weight"].T, w["conv1d.weight"][:, 0]
    hidden, conv_state = causal_conv1d(hidden, taps, None, conv_state, cu_seqlens, activation="silu", return_state=True)
    split = jnp.split(hidden, [KEY_HEADS * DIM, 2 * KEY_HEADS * DIM], axis=-1)
    query, key, value = (piece.reshape(*lead, -1, DIM) for piece in split)
    beta = jax.nn.sigmoid(x @ w["in_proj_b.weight"].T)
    decay = kda_decay(x @ w["in_proj_a.weight"].T, w["A_log"], w["dt_bias"])
    output, state = gated_delta_rule(
        query, key, value, beta, decay, None, state, cu_seqlens=cu_seqlens, return_state=True
    )
    gate = (x @ w["in_proj_z.weight"].T).reshape(output.shape)
    output = rms_norm(output, w["norm.weight"]) * jax.nn.silu(gate)
    return output.reshape(*lead, -1) @ w["out_proj.weight"].T, conv_state, state


prefill, packed, decode = functions_of(mix)


def empty_cache(batch, tokens):
    channels = (2 * KEY_HEADS + VALUE_HEADS) * DIM
    return jnp.zeros((batch, channels, TAPS - 1)), jnp.zeros((batch, VALUE_HEADS, DIM, DIM))
