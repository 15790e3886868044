"""The lightning indexer as a loop over queries and keys, in float64."""

import numpy as np


def sequences(rows, queries, keys, cum_seqlens_q=None, cum_seqlens_k=None):
    """For every batch row and query: the keys of its sequence, and its position among them; None for padding."""
    found = {}
    if cum_seqlens_q is None:
        return {(b, t): (range(keys), keys - queries + t) for b in range(rows) for t in range(queries)}
    cum_seqlens_k = cum_seqlens_q if cum_seqlens_k is None else cum_seqlens_k
    for n in range(len(cum_seqlens_q) - 1):
        count, length = (int(x[n + 1] - x[n]) for x in (cum_seqlens_q, cum_seqlens_k))
        row, query, key = (0, int(cum_seqlens_q[n]), int(cum_seqlens_k[n])) if rows == 1 else (n, 0, 0)
        for i in range(count):
            found[row, query + i] = range(key, key + length), length - count + i
    return found


def lightning_indexer(
    query,
    key,
    weights,
    top_k,
    softmax_scale,
    causal=True,
    sliding_window=None,
    cum_seqlens_q=None,
    cum_seqlens_k=None,
):
    """`lightning_indexer`: indices and scores."""
    (rows, queries, heads, _), keys = query.shape, key.shape[1]
    indices, scores = np.full((rows, queries, top_k), -1), np.full((rows, queries, top_k), -np.inf)
    left, right = (None, None) if sliding_window is None else sliding_window
    for (b, t), (own, position) in sequences(rows, queries, keys, cum_seqlens_q, cum_seqlens_k).items():
        candidates = []
        for at, s in enumerate(own):
            distance = at - position
            if causal and distance > 0:
                continue
            if (left is not None and -distance > left) or (right is not None and distance > right):
                continue
            score = 0.0
            for h in range(heads):
                product = softmax_scale * float(query[b, t, h].astype(np.float64) @ key[b, s].astype(np.float64))
                score += float(weights[b, t, h]) * (product if np.isnan(product) else max(0.0, product))
            candidates.append((not np.isnan(score), -score if not np.isnan(score) else 0.0, s))
        for n, (is_number, negative, s) in enumerate(sorted(candidates)[:top_k]):
            indices[b, t, n], scores[b, t, n] = s, -negative if is_number else np.nan
    return indices, scores
