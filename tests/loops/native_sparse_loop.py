"""Native sparse attention written out query by query in NumPy float64, from the paper's formulas and nothing else here.

Sequences are cut out of their rows and pages first, so that packing, padding and block numbers cannot be confused.
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
    cu_seqlens_k: np.ndarray | None = None
    kv_lens: np.ndarray | None = None
    block_tables: np.ndarray | None = None
    compressed_key: np.ndarray | None = None
    compressed_value: np.ndarray | None = None
    block_size: int = 64
    window_size: int = 512
    softmax_scale: float | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sequence:
    """One sequence: its row and queries there, its keys and values [L, Hk, n], None in tokens of no page, and what
    stands for each complete block, [C, Hk, n].
    """

    row: int
    queries: range
    key: list
    value: list
    block_key: list
    block_value: list


def attention(call: Sparse) -> np.ndarray:
    """The output, float64 [B, T, H, V]; tokens of no sequence are 0."""
    output = np.zeros((*call.query.shape[:3], call.value.shape[3]))
    group = call.query.shape[2] // call.key.shape[2]
    for own in _sequences(call):
        for i, t in enumerate(own.queries):
            position = len(own.key) - len(own.queries) + i
            if position < 0:
                continue
            for g in range(call.key.shape[2]):
                blocks = _chosen(call, own, g, t, position)
                for h in range(g * group, (g + 1) * group):
                    output[own.row, t, h] = _query(call, own, h, g, t, position, blocks)
    return output


def _sequences(call: Sparse):
    """All sequences of a call."""
    (rows, queries), cut = call.query.shape[:2], call.cu_seqlens
    if call.kv_lens is not None or call.block_tables is not None:
        for b in range(rows):
            length = call.key.shape[1] * (1 if call.block_tables is None else call.block_tables.shape[1])
            length = length if call.kv_lens is None else int(call.kv_lens[b])
            yield _sequence(call, b, range(queries if cut is None else int(cut[b + 1] - cut[b])), range(length), b)
        return
    if cut is None:
        for b in range(rows):
            yield _sequence(call, b, range(queries), range(call.key.shape[1]), b)
        return
    keys_cut, blocks_before = cut if call.cu_seqlens_k is None else call.cu_seqlens_k, 0
    for n in range(len(cut) - 1):
        ends = [(int(x[n]), int(x[n + 1])) for x in (cut, keys_cut)]
        own = [range(*x) if rows == 1 else range(x[1] - x[0]) for x in ends]
        yield _sequence(call, 0 if rows == 1 else n, own[0], own[1], n, blocks_before if rows == 1 else 0)
        blocks_before += -(-len(own[1]) // call.block_size)


def _sequence(call: Sparse, row: int, queries: range, keys: range, n: int, first_block: int = 0) -> Sequence:
    def tokens(x):
        if call.block_tables is None:
            return [x[row, j] for j in keys]
        size, pages = x.shape[1], call.block_tables[n]
        return [x[pages[j // size], j % size] if 0 <= pages[j // size] < x.shape[0] else None for j in keys]

    key, value, size = tokens(call.key), tokens(call.value), call.block_size

    def blocks(x, given):
        spans = [x[c * size : (c + 1) * size] for c in range(len(x) // size)]
        if given is None:
            return [None if any(j is None for j in span) else sum(span) / size for span in spans]
        if call.block_tables is None:
            return [given[row, first_block + c] for c in range(len(spans))]
        each = given.shape[1]
        return [
            None if span[0] is None else given[call.block_tables[n, c // each], c % each]
            for c, span in enumerate(spans)
        ]

    block_key, block_value = blocks(key, call.compressed_key), blocks(value, call.compressed_value)
    return Sequence(row=row, queries=queries, key=key, value=value, block_key=block_key, block_value=block_value)


def _chosen(call: Sparse, own: Sequence, g: int, t: int, position: int) -> set[int]:
    """The blocks that a query reads, numbered in its sequence."""
    last = position // call.block_size
    if call.block_indices is not None:
        count = call.block_counts if isinstance(call.block_counts, int) else call.block_counts[own.row, t, g]
        return {int(c) for c in call.block_indices[own.row, t, g, : max(0, count)] if 0 <= c <= last}
    group = call.query.shape[2] // call.key.shape[2]
    complete = _complete(call, own, position)
    weights = dict.fromkeys(complete, 0.0)
    for h in range(g * group, (g + 1) * group):
        scores = _scores(call, own, h, t, [own.block_key[c][g] for c in complete])
        for c, weight in zip(complete, _softmax(scores), strict=True):
            weights[c] += weight
    order = sorted((c for c in complete if c != last), key=lambda c: (-weights[c], -c))
    return {last, *order[: call.block_counts - 1]}


def _complete(call: Sparse, own: Sequence, position: int) -> list[int]:
    """The blocks that end no later than a position, without those of absent pages."""
    return [c for c in range((position + 1) // call.block_size) if own.block_key[c] is not None]


def _query(call: Sparse, own: Sequence, h: int, g: int, t: int, position: int, blocks: set[int]) -> np.ndarray:
    def gate(gates: np.ndarray | None) -> float:
        return 1.0 if gates is None else gates[own.row, t, h]

    def attend(keys, values):
        weights = _softmax(_scores(call, own, h, t, [x[g] for x in keys]))
        values = [x[g] for x in values]
        return sum((w * v for w, v in zip(weights, values, strict=True)), np.zeros(call.value.shape[3]))

    def attend_to_tokens(tokens):
        tokens = [j for j in tokens if own.key[j] is not None]
        return attend([own.key[j] for j in tokens], [own.value[j] for j in tokens])

    listed = [j for c in sorted(blocks) for j in range(c * call.block_size, (c + 1) * call.block_size) if j <= position]
    result = gate(call.g_slc) * attend_to_tokens(listed)
    if call.g_swa is not None:
        near = range(max(0, position - call.window_size + 1), position + 1)
        result = result + gate(call.g_swa) * attend_to_tokens(near)
    if call.g_cmp is not None:
        complete = _complete(call, own, position)
        compressed = attend([own.block_key[c] for c in complete], [own.block_value[c] for c in complete])
        result = result + gate(call.g_cmp) * compressed
    return result


def _scores(call: Sparse, own: Sequence, h: int, t: int, keys: list) -> np.ndarray:
    scale = call.query.shape[3] ** -0.5 if call.softmax_scale is None else call.softmax_scale
    return np.array([scale * (call.query[own.row, t, h] @ key) for key in keys])


def _softmax(scores: np.ndarray) -> np.ndarray:
    if not len(scores):
        return scores
    weights = np.exp(scores - scores.max())
    return weights / weights.sum()
