"""DeepSeek V3.2's sparse attention: latent attention to the tokens that an indexer selects."""

import jax.numpy as jnp
from tests.models.recipes.common import positions, rms_norm, rotate
from tests.models.recipes.shared.latent_attention import LATENT, NOPE, ROPE, matrices, project

from ejkernel.modules import deepseek_attn, lightning_indexer, token_sparse_attention

SOURCE = "deepseek_v32.DeepseekV32Attention"
SELECTED, INDEX_HEADS, INDEX_SIZE = 5, 8, 8
SCALE = (NOPE + ROPE) ** -0.5


def compressed_query(w, x):
    """What the queries of attention and of the indexer are projected from."""
    return rms_norm(x @ w["q_a_proj.weight"].T, w["q_a_layernorm.weight"])


def project_query(w, x):
    return compressed_query(w, x) @ w["q_b_proj.weight"].T


def project_indexer(w, x, position):
    """Queries [B, T, INDEX_HEADS, INDEX_SIZE], keys [B, T, INDEX_SIZE] and weights [B, T, INDEX_HEADS]."""
    query = (compressed_query(w, x) @ w["indexer.wq_b.weight"].T).reshape(*x.shape[:2], INDEX_HEADS, INDEX_SIZE)
    key = layer_norm(x @ w["indexer.wk.weight"].T, w["indexer.k_norm.weight"], w["indexer.k_norm.bias"])
    # The indexer rotates halves of the first ROPE features, where attention rotates pairs of the last ones.
    query, key = (rotate(each, position, features=ROPE) for each in (query, key[:, :, None]))
    return query, key[:, :, 0], x @ w["indexer.weights_proj.weight"].T * INDEX_HEADS**-0.5


def layer_norm(x, weight, bias):
    x32 = x.astype(jnp.float32)
    centred = x32 - jnp.mean(x32, axis=-1, keepdims=True)
    return (centred * (jnp.mean(centred**2, axis=-1, keepdims=True) + 1e-6) ** -0.5 * weight + bias).astype(x.dtype)


def prefill(w, x):
    position = positions(x.shape[1])
    query, latent, key_rope = project(w, x, position, project_query)
    indexer = project_indexer(w, x, position)
    output = deepseek_attn(query, latent, *matrices(w), *indexer, b_k=key_rope, index_topk=SELECTED)
    return output.reshape(*x.shape[:2], -1) @ w["o_proj.weight"].T


def packed(w, x, cu_seqlens):
    position = positions(x.shape[1], cu_seqlens)
    query, latent, key_rope = project(w, x, position, project_query)
    indices, _ = lightning_indexer(*project_indexer(w, x, position), cu_seqlens, top_k=SELECTED)
    return attend(w, query, jnp.concatenate([latent, key_rope], axis=-1), indices)


def attend(w, query, key, indices, **pages):
    """Attention to listed tokens in the absorbed form, of keys [B, S, LATENT + ROPE], and the output projection."""
    w_kc, w_vc = matrices(w)
    nope, rope = query[..., :NOPE], query[..., NOPE:]
    absorbed = jnp.concatenate([jnp.einsum("bthn,rhn->bthr", nope, w_kc), rope], axis=-1)
    options = {"value_size": LATENT, "softmax_scale": SCALE, **pages}
    output = jnp.einsum(
        "bthr,rhv->bthv", token_sparse_attention(absorbed, key[:, :, None], None, indices, **options), w_vc
    )
    return output.reshape(*query.shape[:2], -1) @ w["o_proj.weight"].T


def empty_cache(batch, tokens):
    """Pages of the latent vectors with their rotary keys, and of the indexer's keys. Each sequence has one page."""
    return jnp.zeros((batch, tokens, LATENT + ROPE)), jnp.zeros((batch, tokens, INDEX_SIZE))


def decode(w, x, cache, position):
    query, *new = project(w, x, position[None], project_query)
    query_index, key_index, weights = project_indexer(w, x, position[None])
    new = (jnp.concatenate(new, axis=-1), key_index)
    cache = tuple(old.at[:, position].set(x[:, 0]) for old, x in zip(cache, new, strict=True))
    pages = {"block_tables": jnp.arange(len(x))[:, None], "kv_lens": jnp.full(len(x), position + 1)}
    indices, _ = lightning_indexer(query_index, cache[1], weights, **pages, top_k=SELECTED)
    return attend(w, query, cache[0], indices, **pages), cache
