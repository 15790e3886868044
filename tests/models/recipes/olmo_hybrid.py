"""OLMo Hybrid's gated delta rule: betas up to two, and values of another size than the keys."""

import jax
import jax.numpy as jnp
from tests.models.recipes.common import rms_norm
from tests.models.recipes.shared.recurrent import functions_of

from ejkernel.modules import causal_conv1d, gated_delta_rule, kda_decay

SOURCE = "olmo_hybrid.OlmoHybridGatedDeltaNet"
KEY_HEADS, VALUE_HEADS, KEY_DIM, VALUE_DIM, TAPS = 2, 4, 6, 8, 4


def mix(w, x, conv_state=None, state=None, cu_seqlens=None):
    """The layer over tokens that follow the given states: (output, new convolution state, new state)."""
    lead = x.shape[:2]
    hidden = jnp.concatenate([x @ w[f"{name}_proj.weight"].T for name in "qkv"], axis=-1)
    taps = w["conv1d.weight"][:, 0]
    hidden, conv_state = causal_conv1d(hidden, taps, None, conv_state, cu_seqlens, activation="silu", return_state=True)
    split = jnp.split(hidden, [KEY_HEADS * KEY_DIM, 2 * KEY_HEADS * KEY_DIM], axis=-1)
    query, key = (piece.reshape(*lead, -1, KEY_DIM) for piece in split[:2])
    value = split[2].reshape(*lead, -1, VALUE_DIM)
    beta = 2 * jax.nn.sigmoid(x @ w["b_proj.weight"].T)  # 2 with `linear_allow_neg_eigval`
    decay = kda_decay(x @ w["a_proj.weight"].T, w["A_log"], w["dt_bias"])
    output, state = gated_delta_rule(
        query, key, value, beta, decay, None, state, cu_seqlens=cu_seqlens, return_state=True
    )
    gate = (x @ w["g_proj.weight"].T).reshape(output.shape)
    output = rms_norm(output, w["o_norm.weight"], 1e-5) * jax.nn.silu(gate)
    return output.reshape(*lead, -1) @ w["o_proj.weight"].T, conv_state, state


prefill, packed, decode = functions_of(mix)


def empty_cache(batch, tokens):
    channels = 2 * KEY_HEADS * KEY_DIM + VALUE_HEADS * VALUE_DIM
    return jnp.zeros((batch, channels, TAPS - 1)), jnp.zeros((batch, VALUE_HEADS, KEY_DIM, VALUE_DIM))
