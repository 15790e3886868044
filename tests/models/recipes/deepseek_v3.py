"""DeepSeek V3's latent attention: a low-rank query, and keys and values that are projections of a latent vector."""

import jax.numpy as jnp
from tests.models.recipes.common import positions, rms_norm, rotate_pairs

from ejkernel.modules import flash_mla, mla_decode

SOURCE = "deepseek_v3.DeepseekV3Attention"
HEADS, NOPE, ROPE, VALUE, LATENT = 4, 8, 4, 8, 12


def project(w, x, position):
    """Queries [B, T, H, NOPE + ROPE], latent vectors [B, T, LATENT] and the shared rotary key [B, T, ROPE]."""
    query = rms_norm(x @ w["q_a_proj.weight"].T, w["q_a_layernorm.weight"]) @ w["q_b_proj.weight"].T
    nope, rope = jnp.split(query.reshape(*x.shape[:2], HEADS, -1), [NOPE], axis=-1)
    latent, key_rope = jnp.split(x @ w["kv_a_proj_with_mqa.weight"].T, [LATENT], axis=-1)
    query = jnp.concatenate([nope, rotate_pairs(rope, position)], axis=-1)
    key_rope = rotate_pairs(key_rope[:, :, None], position)[:, :, 0]
    return query, rms_norm(latent, w["kv_a_layernorm.weight"]), key_rope


def matrices(w):
    """The matrices [LATENT, H, ...] that make keys and values of latent vectors."""
    both = w["kv_b_proj.weight"].reshape(HEADS, NOPE + VALUE, LATENT).transpose(2, 0, 1)
    return both[..., :NOPE], both[..., NOPE:]


def prefill(w, x, cu_seqlens=None):
    query, latent, key_rope = project(w, x, positions(x.shape[1], cu_seqlens))
    output = flash_mla(query, latent, *matrices(w), b_k=key_rope, cu_seqlens=cu_seqlens, causal=True)
    return output.reshape(*x.shape[:2], -1) @ w["o_proj.weight"].T


packed = prefill


def empty_cache(batch, tokens):
    return jnp.zeros((batch, tokens, LATENT)), jnp.zeros((batch, tokens, ROPE))


def decode(w, x, cache, position):
    query, *new = project(w, x, position[None])
    cache = tuple(old.at[:, position].set(x[:, 0]) for old, x in zip(cache, new, strict=True))
    output = mla_decode(query[:, 0], *cache, *matrices(w), jnp.full(len(x), position + 1))
    return output.reshape(*x.shape[:2], -1) @ w["o_proj.weight"].T, cache
