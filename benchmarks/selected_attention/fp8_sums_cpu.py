"""How many of the indexer's selected keys change by rounding, in NumPy on a CPU.

Compared are a model of the sums of Hopper's fp8 tensor cores, half-precision sums over heads, and the rounding of
queries and keys to float8_e4m3fn.

    python benchmarks/selected_attention/fp8_sums_cpu.py

The model of a tensor core is that of the report on DeepSeek-V3 (arXiv:2412.19437, section 3.5.2): 32 products and the
accumulator are aligned to the largest exponent among them, and 14 bits of each are kept, of which one is the sign.
"""

import ml_dtypes
import numpy as np

HEADS, CHANNELS, KEYS, TOP_K, QUERIES = 64, 128, 32768, 2048, 4
KEPT_BITS = 13


def rounded(x):
    """Numbers of e4m3 in float32, and the scale of each row."""
    scale = np.abs(x).max(axis=-1, keepdims=True) / 448
    return (x / scale).astype(ml_dtypes.float8_e4m3fn).astype(np.float32), scale[..., 0]


def tensor_core(query, key):
    """Products of one head's query with all keys, with sums of about 14 bits."""
    total = np.zeros(len(key), np.float32)
    for first in range(0, CHANNELS, 32):
        terms = np.concatenate([key[:, first : first + 32] * query[first : first + 32], total[:, None]], axis=1)
        exponent = np.frexp(np.abs(terms).max(axis=1))[1] - KEPT_BITS
        total = np.ldexp(np.floor(np.ldexp(terms, -exponent[:, None])).sum(axis=1), exponent).astype(np.float32)
    return total


def sum_over_heads(products, weights, dtype):
    """The score, from partial sums of four heads in a dtype, which are added in float32."""
    terms = np.maximum(products, 0).astype(dtype)
    total = np.zeros(products.shape[1], np.float32)
    for first in range(0, HEADS, 4):
        part = np.zeros(products.shape[1], dtype)
        for head in range(first, first + 4):
            part = (part.astype(np.float32) + terms[head].astype(np.float32) * np.float32(dtype(weights[head]))).astype(
                dtype
            )
        total += part.astype(np.float32)
    return total


def largest(scores):
    """The selected keys."""
    return set(np.argsort(-scores, kind="stable")[:TOP_K].tolist())


def main():
    rng = np.random.default_rng(0)
    changed = {}
    key = rng.normal(size=(KEYS, CHANNELS)).astype(np.float32)
    key8, key_scale = rounded(key)
    for _ in range(QUERIES):
        query, w = rng.normal(size=(HEADS, CHANNELS)).astype(np.float32), rng.normal(size=HEADS)
        query8, query_scale = rounded(query)
        weights = (w * query_scale * 2.0**-7).astype(np.float32)
        exact = query8.astype(np.float64) @ key8.T.astype(np.float64)
        want = largest((weights.astype(np.float64) @ np.maximum(exact, 0)) * key_scale)
        wide = largest(w @ np.maximum(query.astype(np.float64) @ key.T.astype(np.float64), 0))
        modelled = np.stack([tensor_core(x, key8) for x in query8])
        sides = {
            "fp8 tensor cores": (weights @ np.maximum(modelled, 0)) * key_scale,
            "float32 sums": (weights @ np.maximum(exact, 0).astype(np.float32)) * key_scale,
            "float16, products * 2 ** -7": sum_over_heads(exact * 2.0**-7, weights * 2.0**7, np.float16) * key_scale,
            "bfloat16": sum_over_heads(exact, weights, ml_dtypes.bfloat16) * key_scale,
        }
        for name, scores in sides.items():
            changed.setdefault(name, []).append(len(want - largest(scores)))
        changed.setdefault("rounding to e4m3", []).append(len(wide - want))
    for name, counts in changed.items():
        print(f"{name}: {np.mean(counts):.2f} of {TOP_K} keys per query", counts)


if __name__ == "__main__":
    main()
