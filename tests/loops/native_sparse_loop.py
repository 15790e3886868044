"""Native sparse attention written out query by query in NumPy float64, from the paper's formulas and nothing else here.

Sequences are cut out of their row first, so that packing, padding and block numbers cannot be confused.
"""

import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sparse:
    """Arguments of `native_sparse_attention` as NumPy arrays and Python values."""

    query: np.ndarray
    key: np.ndarray
    value: np.ndarray
    g_cmp: np.ndarray | None = None
    g_slc: np.ndarray | None = None
    g_swa: np.ndarray | None = None
    block_indices: np.ndarray | None = None
    block_counts: int | np.ndarray = 16
    cu_seqlens: np.ndarray | None = None
    block_size: int = 64
    window_size: int = 512
    softmax_scale: float | None = None


def attention(call: Sparse) -> np.ndarray:
    """The output, float64 [B, T, H, V]; tokens of no sequence are 0."""
    batch, _, heads, _ = call.query.shape
    output = np.zeros((*call.query.shape[:3], call.value.shape[3]))
    group = heads // call.key.shape[2]
    for b in range(batch):
        for first, end in _sequences(call, b):
            for t in range(first, end):
                for g in range(call.key.shape[2]):
                    blocks = chosen(call, b, g, t, first)
                    for h in range(g * group, (g + 1) * group):
                        output[b, t, h] = _query(call, b, h, g, t, first, end, blocks)
    return output


def _sequences(call: Sparse, b: int) -> list[tuple[int, int]]:
    if call.cu_seqlens is None:
        return [(0, call.query.shape[1])]
    if call.query.shape[0] > 1:
        return [(0, int(call.cu_seqlens[b + 1] - call.cu_seqlens[b]))]
    return [(int(a), int(z)) for a, z in zip(call.cu_seqlens[:-1], call.cu_seqlens[1:], strict=True)]


def chosen(call: Sparse, b: int, g: int, t: int, first: int) -> set[int]:
    """The blocks that a query reads, numbered in its sequence, which starts at token `first`."""
    own = (t - first) // call.block_size
    if call.block_indices is not None:
        count = call.block_counts if isinstance(call.block_counts, int) else call.block_counts[b, t, g]
        return {int(c) for c in call.block_indices[b, t, g, : max(0, count)] if 0 <= c <= own}
    group = call.query.shape[2] // call.key.shape[2]
    weights = np.zeros(own)
    for h in range(g * group, (g + 1) * group):
        weights += _softmax(_compressed_scores(call, b, h, g, t, first))[:own]
    order = sorted(range(own), key=lambda c: (-weights[c], -c))
    return {own, *order[: call.block_counts - 1]}


def _compressed_scores(call: Sparse, b: int, h: int, g: int, t: int, first: int) -> np.ndarray:
    complete = (t - first + 1) // call.block_size
    means = [_mean(call, call.key, b, g, first, c) for c in range(complete)]
    return np.array([_scale(call) * (call.query[b, t, h] @ mean) for mean in means])


def _mean(call: Sparse, x: np.ndarray, b: int, g: int, first: int, c: int) -> np.ndarray:
    start = first + c * call.block_size
    return sum(x[b, j, g] for j in range(start, start + call.block_size)) / call.block_size


def _query(call: Sparse, b: int, h: int, g: int, t: int, first: int, end: int, blocks: set[int]) -> np.ndarray:
    def gate(gates: np.ndarray | None) -> float:
        return 1.0 if gates is None else gates[b, t, h]

    size = call.block_size
    tokens = [j for c in sorted(blocks) for j in range(first + c * size, min(first + (c + 1) * size, end)) if j <= t]
    result = gate(call.g_slc) * _attend(call, b, h, g, t, tokens)
    if call.g_swa is not None:
        near = range(max(first, t - call.window_size + 1), t + 1)
        result = result + gate(call.g_swa) * _attend(call, b, h, g, t, list(near))
    if call.g_cmp is not None:
        weights = _softmax(_compressed_scores(call, b, h, g, t, first))
        values = [_mean(call, call.value, b, g, first, c) for c in range(len(weights))]
        result = result + gate(call.g_cmp) * sum((w * v for w, v in zip(weights, values, strict=True)), 0.0)
    return result


def _attend(call: Sparse, b: int, h: int, g: int, t: int, tokens: list[int]) -> np.ndarray:
    weights = _softmax(np.array([_scale(call) * (call.query[b, t, h] @ call.key[b, j, g]) for j in tokens]))
    return sum((w * call.value[b, j, g] for w, j in zip(weights, tokens, strict=True)), np.zeros(call.value.shape[3]))


def _softmax(scores: np.ndarray) -> np.ndarray:
    if not len(scores):
        return scores
    weights = np.exp(scores - scores.max())
    return weights / weights.sum()


def _scale(call: Sparse) -> float:
    return call.query.shape[3] ** -0.5 if call.softmax_scale is None else call.softmax_scale
