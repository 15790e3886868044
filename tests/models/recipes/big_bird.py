"""BigBird: blocks of keys around the query's, the first and the last block, and random ones for each head."""

import jax.numpy as jnp

from ejkernel.modules import blocksparse_attention

SOURCE = "big_bird.BigBirdBlockSparseAttention"
HEADS, BLOCK = 4, 4


def pattern(random_blocks):
    """Which block [H, blocks, blocks] a block of queries attends; random_blocks [H, blocks - 2, N]."""
    blocks = random_blocks.shape[1] + 2
    index = jnp.arange(blocks)
    edge = (index == 0) | (index == blocks - 1)
    near = (abs(index[:, None] - index) <= 1) | edge | edge[:, None]
    random = (random_blocks[..., None] == index).any(axis=2)
    return near | jnp.pad(random, ((0, 0), (1, 1), (0, 0)))


def prefill(w, x):
    query, key, value = (
        (x @ w[f"{name}.weight"].T + w[f"{name}.bias"]).reshape(*x.shape[:2], HEADS, -1).swapaxes(1, 2)
        for name in ("query", "key", "value")
    )
    mask = pattern(w["random_blocks"]).repeat(BLOCK, axis=1).repeat(BLOCK, axis=2)[None]
    output = blocksparse_attention(query, key, value, attention_mask=mask, causal=False)
    return jnp.moveaxis(output, 1, 2).reshape(x.shape)
