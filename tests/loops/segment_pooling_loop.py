"""Mean pooling written out token by token in NumPy, from its definition and from nothing else of the project."""

import numpy as np


def pools(rows: list[list[np.ndarray]], size: int | None) -> list[list[np.ndarray]]:
    """The means of each row's tokens, or of each `size` of them."""
    found = []
    for tokens in rows:
        step = max(1, len(tokens)) if size is None else size
        chunks = [tokens[start : start + step] for start in range(0, len(tokens), step)]
        found.append([sum(chunk) / len(chunk) for chunk in chunks])
    return found


def mean_pooling(x: np.ndarray, lengths: list[int] | None, size: int | None) -> np.ndarray:
    """What `mean_pooling` returns.

    Args:
        x: [T, C], [B, T, C] or [B, T, H, D].
        lengths: Of the sequences, packed in one row or one in each; None for all tokens.
        size: Tokens a chunk; None for whole sequences.
    """
    rows = x[None] if x.ndim == 2 else x
    zero = np.zeros(x.shape[2:] if x.ndim > 2 else x.shape[1:])
    if lengths is not None and len(rows) == 1:
        starts = [sum(lengths[:n]) for n in range(len(lengths))]
        sequences = [list(rows[0][start : start + n]) for start, n in zip(starts, lengths, strict=True)]
        found = pools(sequences, size)
        if size is None:
            return np.stack([chunks[0] if chunks else zero for chunks in found])
        total, count = rows.shape[1], len(lengths)
        most = min(total, (total + count * (size - 1)) // size)
        flat = [chunk for chunks in found for chunk in chunks]
        padded = np.stack(flat + [zero] * (most - len(flat)))
        return padded if x.ndim == 2 else padded[None]
    counts = [rows.shape[1]] * len(rows) if lengths is None else lengths
    found = pools([list(row[:n]) for row, n in zip(rows, counts, strict=True)], size)
    if size is None:
        return np.stack([chunks[0] if chunks else zero for chunks in found])
    most = -(-rows.shape[1] // size)
    return np.stack([np.stack(chunks + [zero] * (most - len(chunks))) for chunks in found])
