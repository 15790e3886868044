"""Attention written out pair by pair in NumPy float64, from the formula in DESIGN and from nothing else of the project.

Every number comes from a Python loop over batch row, head, query and key; masks, packing, windows and dropout are
decided one pair at a time. It is what `reference` itself is tested against.
"""

import dataclasses
import math
from typing import Any

import ml_dtypes
import numpy as np

_WORD = 2**32


@dataclasses.dataclass(frozen=True, kw_only=True)
class Call:
    """Public arguments of `flash_attention` as NumPy arrays and Python values; `mask_info` is taken apart."""

    query: np.ndarray
    key: np.ndarray
    value: np.ndarray
    bias: np.ndarray | None = None
    relative_bias: np.ndarray | None = None
    mask: np.ndarray | None = None
    q_segment_ids: np.ndarray | None = None
    kv_segment_ids: np.ndarray | None = None
    q_positions: np.ndarray | None = None
    kv_positions: np.ndarray | None = None
    cum_seqlens_q: np.ndarray | None = None
    cum_seqlens_k: np.ndarray | None = None
    softmax_aux: np.ndarray | None = None
    softmax_scale: float | None = None
    causal: bool = False
    sliding_window: int | tuple[int | None, int | None] | None = None
    logits_soft_cap: float | None = None
    dropout_prob: float = 0.0
    dropout_seed: int = 0
    normalize_output: bool = True
    logits_dtype: str = "float32"


def attention(call: Call) -> np.ndarray:
    """The output, float64 [B, T, H, Dv]."""
    batch, queries, heads, _ = call.query.shape
    output = np.zeros((batch, queries, heads, call.value.shape[3]))
    for b in range(batch):
        for h in range(heads):
            for i in range(queries):
                output[b, i, h] = _row(call, b, h, i)
    return output


def lse(call: Call) -> np.ndarray:
    """The log of the softmax denominator, sinks included, float64 [B, H, T]."""
    batch, queries, heads, _ = call.query.shape
    found = np.full((batch, heads, queries), -np.inf)
    for b, h, i in np.ndindex(found.shape):
        kv_head = h // (heads // call.key.shape[2])
        attended = [j for j in range(call.key.shape[1]) if attends(call, b, h, i, j)]
        terms = [*(_score(call, b, h, i, j, kv_head) for j in attended), *_sinks(call, h)]
        if terms:
            found[b, h, i] = max(terms) + np.log(sum(np.exp(term - max(terms)) for term in terms))
    return found


def attended_rows(call: Call) -> np.ndarray:
    """Which rows have a key to attend, bool [B, T, H]."""
    found = np.zeros(call.query.shape[:3], bool)
    for b, i, h in np.ndindex(found.shape):
        found[b, i, h] = any(attends(call, b, h, i, j) for j in range(call.key.shape[1]))
    return found


def _row(call: Call, b: int, h: int, i: int) -> np.ndarray:
    kv_head = h // (call.query.shape[2] // call.key.shape[2])
    attended = [j for j in range(call.key.shape[1]) if attends(call, b, h, i, j)]
    result = np.zeros(call.value.shape[3])
    if not attended:
        return result
    scores = {j: _score(call, b, h, i, j, kv_head) for j in attended}
    peak = max(scores.values())
    total = sum(np.exp(score - peak) for score in scores.values()) + sum(np.exp(s - peak) for s in _sinks(call, h))
    for j, score in scores.items():
        weight = np.exp(score - peak) / (total if call.normalize_output else 1)
        if call.dropout_prob:
            keep = kept(call.dropout_seed, b, h, i, j, call.dropout_prob)
            weight = weight / (1 - call.dropout_prob) if keep else 0.0
        result += weight * call.value[b, j, kv_head]
    return result


def _sinks(call: Call, h: int) -> Any:
    if call.softmax_aux is None:
        return ()
    if call.softmax_aux.shape == call.query.shape[2:3]:
        return call.softmax_aux[h : h + 1]
    shared = call.softmax_aux.ndim == 1
    return call.softmax_aux if shared else call.softmax_aux[h % len(call.softmax_aux)]


def _score(call: Call, b: int, h: int, i: int, j: int, kv_head: int) -> float:
    scale = call.query.shape[3] ** -0.5 if call.softmax_scale is None else call.softmax_scale
    score = scale * sum(x * y for x, y in zip(call.query[b, i, h], call.key[b, j, kv_head], strict=True))
    if call.bias is not None:
        score += _at(call.bias, b, h, i, j)
    if call.relative_bias is not None:
        farthest = call.relative_bias.shape[1] // 2
        score += call.relative_bias[h, farthest + min(max(j - i, -farthest), farthest)]
    if call.logits_soft_cap is not None:
        score = call.logits_soft_cap * np.tanh(score / call.logits_soft_cap)
    if call.logits_dtype != "float32":
        score = _rounded(float(score), ml_dtypes.finfo(call.logits_dtype).nmant + 1)
    return score


def _rounded(x: float, digits: int) -> float:
    """x to so many binary digits, ties to even; a cast of ml_dtypes rounds twice, first to float32."""
    fraction, exponent = math.frexp(x)
    return math.ldexp(round(math.ldexp(fraction, digits)), exponent - digits)


def attends(call: Call, b: int, h: int, i: int, j: int) -> bool:
    if call.mask is not None and not _at(call.mask, b, h, i, j):
        return False
    if call.q_segment_ids is not None:
        q_id, k_id = call.q_segment_ids[b, i], call.kv_segment_ids[b, j]
        if q_id != k_id or q_id < 0:
            return False
    q, k = i, j
    if call.cum_seqlens_q is not None:
        cum_k = call.cum_seqlens_q if call.cum_seqlens_k is None else call.cum_seqlens_k
        (q_sequence, q), (k_sequence, k) = _place(call, call.cum_seqlens_q, b, i), _place(call, cum_k, b, j)
        if q_sequence is None or q_sequence != k_sequence:
            return False
    if call.q_positions is not None:
        q = call.q_positions[min(b, len(call.q_positions) - 1), i]
    if call.kv_positions is not None:
        k = call.kv_positions[min(b, len(call.kv_positions) - 1), j]
    if call.causal and k > q:
        return False
    window = call.sliding_window
    left, right = window if isinstance(window, tuple) else (window, window)
    return (left is None or k >= q - left) and (right is None or k <= q + right)


def _place(call: Call, cum: np.ndarray, b: int, token: int) -> tuple[int | None, int]:
    """Sequence number and place in the sequence; packed in one row, or one sequence a row."""
    if len(call.query) > 1:
        return (b, token) if token < cum[b + 1] - cum[b] else (None, token)
    for sequence in range(len(cum) - 1):
        if cum[sequence] <= token < cum[sequence + 1]:
            return sequence, token - cum[sequence]
    return None, token


def _at(array: np.ndarray, *index: int) -> Any:
    return array[tuple(0 if size == 1 else n for n, size in zip(index, array.shape, strict=True))]


def kept(seed: int, b: int, h: int, i: int, j: int, prob: float) -> bool:
    state = _mix(seed % _WORD)
    for counter in (b, h, i):
        state = _mix((state + counter) % _WORD)
    product = (state | 1) * (_mix(j * 0x9E3779B1 % _WORD) | 1) % _WORD
    return product >= min(round(prob * _WORD), _WORD - 1)


def _mix(x: int) -> int:
    x = (x ^ (x >> 16)) * 0x85EBCA6B % _WORD
    x = (x ^ (x >> 13)) * 0xC2B2AE35 % _WORD
    return x ^ (x >> 16)
