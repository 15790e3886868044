"""xLSTM's mLSTM: gated linear attention whose values have a column of ones, which sums up the weights."""

import jax
import jax.numpy as jnp
from tests.models.recipes.shared.recurrent import functions_of

from ejkernel.modules import gla_attention

SOURCE = "xlstm.xLSTMLayer"
HEADS, KEY_DIM, VALUE_DIM, CAP = 2, 4, 8, 15.0


def layer_norm(x, weight):
    centred = x - x.mean(-1, keepdims=True)
    return centred * jax.lax.rsqrt((centred**2).mean(-1, keepdims=True) + 1e-6) * weight.reshape(HEADS, -1)


def mix(w, x, state=None, cu_seqlens=None):
    """The layer over tokens that follow the given state: (output, new state)."""
    query, key, value = ((x @ w[f"{name}.weight"].T).reshape(*x.shape[:2], HEADS, -1) for name in ("q", "k", "v"))
    write, forget = (
        CAP * jnp.tanh((x @ w[f"{name}gate_preact.weight"].T + w[f"{name}gate_preact.bias"]) / CAP) for name in "if"
    )
    # The cap keeps exp(write) far below float32's largest number, so no running maximum is needed.
    key = key * jnp.exp(write)[..., None]
    value = jnp.concatenate([value, jnp.ones((*value.shape[:3], 1), x.dtype)], axis=-1)
    gates = jax.nn.log_sigmoid(forget)
    both, state = gla_attention(query, key, value, gates, initial_state=state, cu_seqlens=cu_seqlens, return_state=True)
    output = both[..., :-1] / jnp.maximum(jnp.abs(both[..., -1:]), 1)
    output = layer_norm(output, w["multihead_norm.weight"]).reshape(*x.shape[:2], -1)
    return (jax.nn.sigmoid(x @ w["ogate_preact.weight"].T) * output) @ w["out_proj.weight"].T, state


prefill, packed, decode = functions_of(mix)


def empty_cache(batch, tokens):
    return (jnp.zeros((batch, HEADS, KEY_DIM, VALUE_DIM + 1)),)
