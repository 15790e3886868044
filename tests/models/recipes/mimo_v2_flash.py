"""MiMo V2 Flash: values narrower than keys, partly rotated heads, sinks and a window."""

import jax.numpy as jnp
from tests.models.recipes.common import rotate
from tests.models.recipes.shared import grouped_attention

SOURCE = "mimo_v2_flash.MiMoV2FlashAttention"
HEAD_DIM, VALUE_DIM, KV_HEADS, ROTATED = 12, 8, 2, 4
WINDOW = (4, 0)
VALUE_SCALE = 0.707


def terms(w):
    return dict(softmax_aux=w["sinks"], sliding_window=WINDOW)


def project(w, x, position):
    """Queries and keys [B, T, heads, HEAD_DIM], values [B, T, heads, VALUE_DIM] of tokens at these positions [T]."""
    query, key = ((x @ w[f"{name}_proj.weight"].T).reshape(*x.shape[:2], -1, HEAD_DIM) for name in ("q", "k"))
    value = VALUE_SCALE * (x @ w["v_proj.weight"].T).reshape(*x.shape[:2], -1, VALUE_DIM)
    return rotate(query, position, features=ROTATED), rotate(key, position, features=ROTATED), value


prefill, packed, decode = grouped_attention.functions_of(terms, project)


def empty_cache(batch, tokens):
    return tuple(jnp.zeros((batch, tokens, KV_HEADS, size)) for size in (HEAD_DIM, VALUE_DIM))
