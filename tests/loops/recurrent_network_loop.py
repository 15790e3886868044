"""Recurrent networks written out token by token in NumPy float64, from their definitions and from nothing else."""

import numpy as np


def sigmoid(x: np.ndarray) -> np.ndarray:
    """The logistic function."""
    return 1 / (1 + np.exp(-x))


def after(kind: str, x: np.ndarray, h: np.ndarray, c: np.ndarray, weights: tuple) -> tuple[np.ndarray, np.ndarray]:
    """State and cell after one token of one row; the cell is of use to lstm alone."""
    w, u, b, d = weights
    size = len(h)

    def gate(n: int, reset: np.ndarray | float = 1.0) -> np.ndarray:
        own = slice(n * size, (n + 1) * size)
        return w[own] @ x + b[own] + reset * (u[own] @ h + d[own])

    if kind == "gru":
        update = sigmoid(gate(1))
        return (1 - update) * np.tanh(gate(2, sigmoid(gate(0)))) + update * h, c
    if kind == "lstm":
        c = sigmoid(gate(1)) * c + sigmoid(gate(0)) * np.tanh(gate(2))
        return sigmoid(gate(3)) * np.tanh(c), c
    return (np.tanh(gate(0)) if kind == "tanh" else np.maximum(gate(0), 0)), c


def network(
    kind: str,
    x: np.ndarray,
    weight_ih: np.ndarray,
    weight_hh: np.ndarray,
    bias_ih: np.ndarray | None = None,
    bias_hh: np.ndarray | None = None,
    weight_ih_deep: np.ndarray | None = None,
    initial_hidden: np.ndarray | None = None,
    initial_cell: np.ndarray | None = None,
    lengths: list[int] | None = None,
) -> tuple[np.ndarray, ...]:
    """Output, final states and for lstm final cells, float64.

    Args:
        kind: `"tanh"`, `"relu"`, `"gru"` or `"lstm"`.
        x: [B, T, F]; the other arrays likewise as the operations have them.
    """
    (layers, directions, gates, size), (rows, tokens) = weight_hh.shape, x.shape[:2]
    states, cells = np.zeros((2, layers * directions, rows, size))
    inputs = x
    for layer in range(layers):
        outputs = np.zeros((rows, tokens, directions * size))
        for direction in range(directions):
            one = layer * directions + direction
            biases = [np.zeros(gates) if bias is None else bias[layer, direction] for bias in (bias_ih, bias_hh)]
            first = weight_ih[direction] if layer == 0 else weight_ih_deep[layer - 1, direction]
            for row in range(rows):
                h = np.zeros(size) if initial_hidden is None else initial_hidden[one, row]
                c = np.zeros(size) if initial_cell is None else initial_cell[one, row]
                steps = range(tokens if lengths is None else lengths[row])
                for t in reversed(steps) if direction else steps:
                    h, c = after(kind, inputs[row, t], h, c, (first, weight_hh[layer, direction], *biases))
                    outputs[row, t, direction * size : (direction + 1) * size] = h
                states[one, row], cells[one, row] = h, c
        inputs = outputs
    return (inputs, states, cells) if kind == "lstm" else (inputs, states)
