"""Token-sparse attention as a loop over queries, heads and listed keys, in float64."""

import ml_dtypes
import numpy as np


def token_sparse_attention(
    query,
    key,
    value,
    indices,
    softmax_aux=None,
    value_size=None,
    softmax_scale=None,
    block_tables=None,
    kv_lens=None,
    key_format=None,
):
    """`token_sparse_attention`: output and lse."""
    (rows, tokens, heads, size), (_, keys, kv_heads, _) = query.shape, key.shape
    scale = size**-0.5 if softmax_scale is None else softmax_scale
    value_size = value_size if value is None else value.shape[3]
    output, lse = np.zeros((rows, tokens, heads, value_size)), np.full((rows, heads, tokens), -np.inf)
    for b, t, h in np.ndindex(rows, tokens, heads):
        g = h // (heads // kv_heads)
        listed = indices[b, t] if indices.ndim == 3 else indices[b, t, g % indices.shape[2]]
        total, acc = 0.0 if softmax_aux is None else np.exp(float(softmax_aux[h])), np.zeros(value_size)
        for j in listed:
            at = (b, j) if block_tables is None else slot(int(j), block_tables[b], keys, key.shape[0])
            if at is None or (kv_lens is not None and j >= kv_lens[b]) or not 0 <= at[1] < keys:
                continue
            k = fp8_row(key[*at, g], value_size) if key_format else key[*at, g].astype(np.float64)
            v = k[:value_size] if value is None else value[*at, g].astype(np.float64)
            weight = np.exp(scale * float(query[b, t, h].astype(np.float64) @ k))
            total, acc = total + weight, acc + weight * v
        if total > 0:
            output[b, t, h], lse[b, h, t] = acc / total, np.log(total)
    return output, lse


def slot(token, table, page_size, pages):
    """The page and the slot of a token; None for none."""
    if token < 0 or token // page_size >= len(table) or not 0 <= table[token // page_size] < pages:
        return None
    return int(table[token // page_size]), token % page_size


def fp8_row(row, size):
    """The numbers in the bytes of a latent vector of `size` channels and a rotary key."""
    codes = row[:size].view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    scales = row[size : size + size // 32].copy().view("<f4").astype(np.float64)
    rotary = row[size + size // 32 :].copy().view(ml_dtypes.bfloat16).astype(np.float64)
    return np.concatenate([codes * np.repeat(scales, 128), rotary])
