"""Longformer: a window, and global tokens, which attend and are attended by all with projections of their own."""

import jax.numpy as jnp
import numpy as np

from ejkernel.modules import blocksparse_attention

SOURCE = "longformer.LongformerSelfAttention"
HEADS, WINDOW, GLOBAL = 4, 3, (0, 10)


def project(w, x, names):
    """[B, H, T, HEAD_DIM] of each of these projections."""
    made = (x @ w[f"{name}.weight"].T + w[f"{name}.bias"] for name in names)
    return [piece.reshape(*x.shape[:2], HEADS, -1).swapaxes(1, 2) for piece in made]


def prefill(w, x):
    token = np.arange(x.shape[1])
    is_global = np.isin(token, GLOBAL)
    # A mask of NumPy is read before the kernel is built, which skips the blocks without a pair.
    near = (abs(token[:, None] - token) <= WINDOW) | is_global
    local = blocksparse_attention(
        *project(w, x, ("query", "key", "value")), attention_mask=near[None, None], causal=False
    )
    query, key, value = project(w, x, ("query_global", "key_global", "value_global"))
    attended = blocksparse_attention(query[:, :, np.array(GLOBAL)], key, value, causal=False)
    output = local.at[:, :, np.array(GLOBAL)].set(attended)
    return jnp.moveaxis(output, 1, 2).reshape(x.shape)
