"""Token-sparse attention as a loop over queries, heads and listed keys, in float64."""

import numpy as np


def token_sparse_attention(query, key, value, indices, softmax_aux=None, value_size=None, softmax_scale=None):
    """`token_sparse_attention`: output and lse."""
    (rows, tokens, heads, size), (_, keys, kv_heads, _) = query.shape, key.shape
    scale = size**-0.5 if softmax_scale is None else softmax_scale
    value = key[..., :value_size] if value is None else value
    output, lse = np.zeros((rows, tokens, heads, value.shape[3])), np.full((rows, heads, tokens), -np.inf)
    for b, t, h in np.ndindex(rows, tokens, heads):
        g = h // (heads // kv_heads)
        listed = indices[b, t] if indices.ndim == 3 else indices[b, t, g % indices.shape[2]]
        total, acc = 0.0 if softmax_aux is None else np.exp(float(softmax_aux[h])), np.zeros(value.shape[3])
        for j in listed:
            if 0 <= j < keys:
                q, k = query[b, t, h].astype(np.float64), key[b, j, g].astype(np.float64)
                weight = np.exp(scale * float(q @ k))
                total, acc = total + weight, acc + weight * value[b, j, g].astype(np.float64)
        if total > 0:
            output[b, t, h], lse[b, h, t] = acc / total, np.log(total)
    return output, lse
