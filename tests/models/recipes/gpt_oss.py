"""GPT-OSS: a sink logit per head, a window in every other layer, biases."""

from tests.models.recipes.common import rotate
from tests.models.recipes.shared import grouped_attention

SOURCE = "gpt_oss.GptOssAttention"
WINDOW = (4, 0)


def terms(w):
    return dict(softmax_aux=w["sinks"], sliding_window=WINDOW)


def project(w, x, position):
    """Queries, keys and values [B, T, heads, head_dim] of tokens at these positions [T]."""
    query, key, value = (
        (x @ w[f"{name}_proj.weight"].T + w[f"{name}_proj.bias"]).reshape(*x.shape[:2], -1, grouped_attention.HEAD_DIM)
        for name in ("q", "k", "v")
    )
    return rotate(query, position), rotate(key, position), value


def project_output(w, attended):
    return grouped_attention.project_output(w, attended) + w["o_proj.bias"]


prefill, packed, decode = grouped_attention.functions_of(terms, project, project_output)
empty_cache = grouped_attention.empty_cache
