"""Attention of sequences that end together, written out pair by pair in NumPy float64."""

import numpy as np


def attention(q, k, v, *, causal=True, bias=None, slopes=None, scale=None):
    """One sequence: q [T, H, D], k [S, Hk, D], v [S, Hk, V], bias [H, T, S], slopes [H] -> [T, H, V]."""
    q, k, v, bias, slopes = (None if x is None else np.asarray(x, np.float64) for x in (q, k, v, bias, slopes))
    (queries, heads, size), keys = q.shape, k.shape[0]
    output = np.zeros((queries, heads, v.shape[2]))
    for i in range(queries):
        for h in range(heads):
            kv_head = h // (heads // k.shape[1])
            scores = {}
            for j in range(keys):
                if causal and j > i + keys - queries:
                    continue
                score = (size**-0.5 if scale is None else scale) * float(np.dot(q[i, h], k[j, kv_head]))
                if bias is not None:
                    score += bias[h, i, j]
                if slopes is not None:
                    score -= slopes[h] * abs(i + keys - queries - j)
                if score > -np.inf:
                    scores[j] = score
            if scores:
                peak = max(scores.values())
                weights = {j: np.exp(score - peak) for j, score in scores.items()}
                total = sum(weights.values())
                output[i, h] = sum(w / total * v[j, kv_head] for j, w in weights.items())
    return output


def packed(q, k, v, cu_q, cu_k, *, bias=None, slopes=None, **options):
    """Packed sequences; bias [N|1, H|1, max_q, max_k], slopes [N, H]."""
    output = np.zeros((*q.shape[:2], v.shape[2]))
    for n in range(len(cu_q) - 1):
        rows, columns = slice(cu_q[n], cu_q[n + 1]), slice(cu_k[n], cu_k[n + 1])
        queries, keys = rows.stop - rows.start, columns.stop - columns.start
        extra = {"slopes": None if slopes is None else slopes[n]}
        if bias is not None:
            wide = np.broadcast_to(bias, (len(cu_q) - 1, q.shape[1], *bias.shape[2:]))
            extra["bias"] = wide[n, :, :queries, :keys]
        output[rows] = attention(q[rows], k[columns], v[columns], **extra, **options)
    return output


def gradient(function, x: np.ndarray, weight: np.ndarray, step: float = 1e-5) -> np.ndarray:
    """Of `sum(weight * function(x))` by central differences, in float64."""
    result = np.zeros(x.shape)
    for index in np.ndindex(x.shape):
        sums = []
        for sign in (1, -1):
            moved = x.astype(np.float64)
            moved[index] += sign * step
            sums.append(np.sum(weight * function(moved)))
        result[index] = (sums[0] - sums[1]) / (2 * step)
    return result
