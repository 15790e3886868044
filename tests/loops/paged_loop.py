"""Attention over cached sequences written out row by row in NumPy float64, from the formula in DESIGN and nothing else.

A batch holds its sequences as plain arrays of tokens: no pages, tables or packing, which `paged_calls` adds.
"""

import dataclasses
from typing import Any

import numpy as np


@dataclasses.dataclass(frozen=True, kw_only=True)
class Batch:
    """Sequences of tokens, the newest of which are queries.

    Attributes:
        queries: One [q_n, H, D] a sequence.
        keys: One [len_n, Hk, D] a sequence.
        values: One [len_n, Hk, Dv] a sequence.
    """

    queries: list[np.ndarray]
    keys: list[np.ndarray]
    values: list[np.ndarray]


def make(
    lens: Any, q_lens: Any, heads: tuple[int, int] = (4, 2), d: int = 8, v: int | None = None, seed: int = 0
) -> Batch:
    """A batch of normal numbers."""
    rng, (h, g) = np.random.default_rng(seed), heads
    return Batch(
        queries=[rng.normal(size=(q, h, d)) for q in q_lens],
        keys=[rng.normal(size=(n, g, d)) for n in lens],
        values=[rng.normal(size=(n, g, v or d)) for n in lens],
    )


def attend(
    batch: Batch,
    *,
    scale: float | None = None,
    causal: bool = True,
    window: int | tuple[int | None, int | None] | None = None,
    cap: float | None = None,
    sinks: np.ndarray | None = None,
    alibi: np.ndarray | None = None,
    qq_bias: np.ndarray | None = None,
    first: np.ndarray | None = None,
    chunk: int | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> list[tuple[np.ndarray, np.ndarray]]:
    """For each sequence the output [q, H, Dv] and the log of the softmax denominator [q, H].

    `qq_bias` is one table for all sequences, or a list with one for each.
    """
    results = []
    left, right = (window - 1, 0) if isinstance(window, int) else window or (None, None)
    for n, (query, key, value) in enumerate(zip(batch.queries, batch.keys, batch.values, strict=True)):
        rows, heads, size = query.shape
        pairs = qq_bias if qq_bias is None or np.ndim(qq_bias) == 2 else qq_bias[n]
        context = len(key) - rows
        output, lse = np.zeros((rows, heads, value.shape[2])), np.full((rows, heads), -np.inf)
        for i in range(rows):
            for h in range(heads):
                kv, scores = h // (heads // key.shape[1]), {}
                for k in range(0 if first is None else first[n], len(key)):
                    position = context + i
                    if not attends(k, position, causal, (left, right), chunk):
                        continue
                    score = k_scale * (size**-0.5 if scale is None else scale) * float(query[i, h] @ key[k, kv])
                    column = k - context
                    score += alibi[h] * column if alibi is not None else 0
                    if pairs is not None and 0 <= column < len(pairs) and i < len(pairs):
                        if pairs[i, column] == -np.inf:  # it masks, whatever the soft cap
                            continue
                        score += pairs[i, column]
                    scores[k] = score if cap is None else cap * np.tanh(score / cap)
                everything = [*scores.values(), *(() if sinks is None else (sinks[h],))]
                if everything:
                    peak = max(everything)
                    lse[i, h] = peak + np.log(sum(np.exp(score - peak) for score in everything))
                    output[i, h] = sum(
                        (np.exp(s - lse[i, h]) * value[k, kv] for k, s in scores.items()), np.zeros(value.shape[2])
                    )
        results.append((v_scale * output, lse))
    return results


def attends(k: int, position: int, causal: bool, window: tuple[int | None, int | None], chunk: int | None) -> bool:
    """Whether a query attends to a key, by their positions."""
    left, right = window
    if causal and k > position:
        return False
    if (left is not None and k < position - left) or (right is not None and k > position + right):
        return False
    return chunk is None or k // chunk == position // chunk


def packed(batch: Batch, **options: Any) -> np.ndarray:
    """The outputs of all sequences one after another, [T, H, Dv]."""
    return np.concatenate([output for output, _ in attend(batch, **options)])
