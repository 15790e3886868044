"""DeepSeek's latent attention: keys and values are projections of a latent vector. Models differ in the query."""

import jax.numpy as jnp
from tests.models.recipes.common import positions, rms_norm, rotate_pairs

from ejkernel.modules import flash_mla, mla_decode

HEADS, NOPE, ROPE, VALUE, LATENT = 4, 8, 4, 8, 12


def project(w, x, position, project_query):
    """Queries [B, T, H, NOPE + ROPE], latent vectors [B, T, LATENT] and the shared rotary key [B, T, ROPE]."""
    nope, rope = jnp.split(project_query(w, x).reshape(*x.shape[:2], HEADS, -1), [NOPE], axis=-1)
    latent, key_rope = jnp.split(x @ w["kv_a_proj_with_mqa.weight"].T, [LATENT], axis=-1)
    query = jnp.concatenate([nope, rotate_pairs(rope, position)], axis=-1)
    key_rope = rotate_pairs(key_rope[:, :, None], position)[:, :, 0]
    return query, rms_norm(latent, w["kv_a_layernorm.weight"]), key_rope


def matrices(w):
    """The matrices [LATENT, H, ...] that make keys and values of latent vectors."""
    both = w["kv_b_proj.weight"].reshape(HEADS, NOPE + VALUE, LATENT).transpose(2, 0, 1)
    return both[..., :NOPE], both[..., NOPE:]


def functions_of(project_query):
    """Returns `prefill`, `packed`, `empty_cache` and `decode` of a layer whose queries are `project_query(w, x)`."""

    def prefill(w, x, cu_seqlens=None):
        query, latent, key_rope = project(w, x, positions(x.shape[1], cu_seqlens), project_query)
        output = flash_mla(query, latent, *matrices(w), b_k=key_rope, cu_seqlens=cu_seqlens, causal=True)
        return output.reshape(*x.shape[:2], -1) @ w["o_proj.weight"].T

    def decode(w, x, cache, position):
        query, *new = project(w, x, position[None], project_query)
        cache = tuple(old.at[:, position].set(x[:, 0]) for old, x in zip(cache, new, strict=True))
        output = mla_decode(query[:, 0], *cache, *matrices(w), jnp.full(len(x), position + 1))
        return output.reshape(*x.shape[:2], -1) @ w["o_proj.weight"].T, cache

    return prefill, prefill, empty_cache, decode


def empty_cache(batch, tokens):
    return jnp.zeros((batch, tokens, LATENT)), jnp.zeros((batch, tokens, ROPE))
