"""T5's encoder: scores without a scale, and a learned bias for each bucket of distances."""

import numpy as np

from ejkernel.modules import flash_attention

SOURCE = "t5.T5Attention"
HEAD_DIM, BUCKETS, FARTHEST = 8, 8, 12


def bucket(distance):
    """The bucket of key position minus query position: exact up to a quarter of the buckets, then logarithmic."""
    half, exact = BUCKETS // 2, BUCKETS // 4
    far = np.abs(distance)
    log = np.log(np.maximum(far, 1) / exact) / np.log(FARTHEST / exact) * (half - exact)
    large = np.minimum(exact + log.astype(np.int32), half - 1)
    return np.where(distance > 0, half, 0) + np.where(far < exact, far, large)


def prefill(w, x):
    query, key, value = ((x @ w[f"{name}.weight"].T).reshape(*x.shape[:2], -1, HEAD_DIM) for name in "qkv")
    # Distances of `FARTHEST` and more share a bucket, so that a table up to there is all.
    table = w["relative_attention_bias.weight"][bucket(np.arange(-FARTHEST, FARTHEST + 1))]
    output = flash_attention(query, key, value, softmax_scale=1.0, relative_bias=table.T)
    return output.reshape(*x.shape[:2], -1) @ w["o.weight"].T
