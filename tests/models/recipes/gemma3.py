"""Gemma 3: norms of queries and keys, and a window in five of six layers."""

from tests.models.recipes.common import rms_norm, rotate
from tests.models.recipes.shared import grouped_attention

SOURCE = "gemma3.Gemma3Attention"
TERMS = dict(sliding_window=(4, 0), softmax_scale=24**-0.5)


def project(w, x, position):
    query, key, value = grouped_attention.heads(w, x)
    query, key = rms_norm(query, 1 + w["q_norm.weight"]), rms_norm(key, 1 + w["k_norm.weight"])
    return rotate(query, position), rotate(key, position), value


prefill, packed, decode = grouped_attention.functions_of(lambda w: TERMS, project)
empty_cache = grouped_attention.empty_cache
