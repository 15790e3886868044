"""Native sparse attention on a CPU against attention under a dense mask: time, and temporary memory.

    # sequences of 4096 and 8192; takes some minutes
    python benchmarks/selected_attention/native_sparse_attention_cpu.py
    python benchmarks/selected_attention/native_sparse_attention_cpu.py --quick  # 1024

Every query reads 16 blocks of 64 keys, which are given, and no other branch is there: the other side then is one
softmax under one mask, made of the same blocks.
"""

import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.modules import native_sparse_attention

sys.path.append(str(Path(__file__).parents[1]))
import shared.sides

BLOCK, BLOCKS, HEADS, SIZE = 64, 16, 8, 64


def arrays(length: int, kv_heads: int) -> tuple[jax.Array, ...]:
    """Query, key, value, and block indices with each query's own block among them."""
    keys = jax.random.split(jax.random.key(0), 4)
    query = jax.random.normal(keys[0], (1, length, HEADS, SIZE))
    key, value = (jax.random.normal(k, (1, length, kv_heads, SIZE)) for k in keys[1:3])
    own = jnp.arange(length)[None, :, None, None] // BLOCK
    listed = jax.random.randint(keys[3], (1, length, kv_heads, BLOCKS - 1), 0, own + 1)
    indices = jnp.concatenate([jnp.broadcast_to(own, (1, length, kv_heads, 1)), listed], axis=-1)
    return query, key, value, indices


def masked(query: jax.Array, key: jax.Array, value: jax.Array, allowed: Any) -> jax.Array:
    """Attention under a mask [B, H, T, T]."""
    group = query.shape[2] // key.shape[2]
    key, value = (jnp.repeat(x, group, axis=2) for x in (key, value))
    scores = jnp.einsum("bthd,bshd->bhts", query, key) * query.shape[3] ** -0.5
    weights = jax.nn.softmax(jnp.where(allowed, scores, -jnp.inf), axis=-1)
    return jnp.einsum("bhts,bshd->bthd", weights, value)


def dense(query: jax.Array, key: jax.Array, value: jax.Array, indices: jax.Array) -> jax.Array:
    """The selected branch."""
    length = query.shape[1]
    token, block = jnp.arange(length), jnp.arange(length // BLOCK)
    listed = (indices[..., None] == block).any(axis=3)  # [B, T, Hk, M]
    allowed = jnp.repeat(listed, BLOCK, axis=-1) & (token <= token[:, None])[:, None]
    return masked(query, key, value, jnp.repeat(allowed, HEADS // key.shape[2], axis=2).swapaxes(1, 2))


def selected(query: jax.Array, key: jax.Array, value: jax.Array, indices: jax.Array) -> jax.Array:
    """The same by the operation."""
    return native_sparse_attention(query, key, value, None, None, indices, BLOCKS, block_size=BLOCK)


def main() -> None:
    options = shared.sides.parse_options(__doc__.splitlines()[0])
    shared.sides.print_table_header("dense")
    repeats = 3 if options.quick else 5
    for length in (1024,) if options.quick else (4096, 8192):
        for kv_heads in (2, 8):
            inputs = arrays(length, kv_heads)
            shared.sides.print_comparison(f"{length}, {kv_heads} KV heads", selected, dense, inputs, (0, 1, 2), repeats)


if __name__ == "__main__":
    main()
