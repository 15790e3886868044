"""T5's encoder: scores without a scale, and a learned bias for each bucket of distances."""

import jax.numpy as jnp
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
    token = np.arange(x.shape[1])
    bias = w["relative_attention_bias.weight"][bucket(token - token[:, None])]  # [T, S, H]
    bias = jnp.moveaxis(bias, -1, 0)[None]
    output = flash_attention(query, key, value, bias, softmax_scale=1.0)
    return output.reshape(*x.shape[:2], -1) @ w["o.weight"].T
