"""The causal convolution written out number by number in NumPy float64, from its definition and from nothing else."""

import itertools

import numpy as np


def causal_conv1d(
    x: np.ndarray,
    weight: np.ndarray,
    bias: np.ndarray | None = None,
    initial_state: np.ndarray | None = None,
    cu_seqlens: np.ndarray | None = None,
    activation: str | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Output [B, T, C] and the last W - 1 tokens of every sequence, [B, C, W - 1] or [N, C, W - 1], float64."""
    (rows, tokens, channels), width = x.shape, weight.shape[1]
    spans = [(row, 0, tokens) for row in range(rows)]
    if cu_seqlens is not None:
        spans = [(0, int(a), int(b)) for a, b in itertools.pairwise(cu_seqlens)]
    output, states = np.zeros(x.shape), np.zeros((len(spans), channels, width - 1))
    for n, (row, begin, end) in enumerate(spans):
        for c in range(channels):
            line = [0.0] * (width - 1) if initial_state is None else [float(value) for value in initial_state[n, c]]
            line += [float(value) for value in x[row, begin:end, c]]
            for t in range(end - begin):
                p = 0.0 if bias is None else float(bias[c])
                for j in range(width):
                    p += float(weight[c, j]) * line[t + j]
                output[row, begin + t, c] = p / (1 + np.exp(-p)) if activation == "silu" else p
            states[n, c] = line[len(line) - (width - 1) :]
    return output, states
