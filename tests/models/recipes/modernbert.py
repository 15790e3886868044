"""ModernBERT: local layers see `sliding_window` tokens on either side."""

import jax.numpy as jnp
from tests.models.recipes.common import positions, rotate

from ejkernel.modules import flash_attention

SOURCE = "modernbert.ModernBertAttention"
HEAD_DIM, WINDOW = 8, 3  # `local_attention = 6`: three tokens to the left and three to the right


def prefill(w, x, cu_seqlens=None):
    position = positions(x.shape[1], cu_seqlens)
    fused = (x @ w["Wqkv.weight"].T).reshape(*x.shape[:2], 3, -1, HEAD_DIM)
    query, key, value = (jnp.squeeze(part, 2) for part in jnp.split(fused, 3, axis=2))
    query, key = rotate(query, position), rotate(key, position)
    output = flash_attention(query, key, value, cum_seqlens_q=cu_seqlens, sliding_window=WINDOW)
    return output.reshape(x.shape) @ w["Wo.weight"].T


packed = prefill
