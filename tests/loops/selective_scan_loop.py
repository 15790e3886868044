"""The selective scan written out number by number in NumPy float64, from its definition and from nothing else."""

from collections.abc import Callable

import numpy as np


def silu(x: np.ndarray) -> np.ndarray:
    """x sigmoid(x)."""
    return x / (1 + np.exp(-x))


def state_space_v1(
    hidden_states: np.ndarray,
    A: np.ndarray,
    B: np.ndarray,
    C: np.ndarray,
    D: np.ndarray,
    dt: np.ndarray,
    gate: np.ndarray | None = None,
    initial_state: np.ndarray | None = None,
    act_fn: Callable[[np.ndarray], np.ndarray] = silu,
) -> tuple[np.ndarray, np.ndarray]:
    """Output [B, T, I] and final states [B, I, E], float64."""
    x = hidden_states.astype(float)
    (rows, tokens, channels), size = x.shape, A.shape[1]
    state = np.zeros((rows, channels, size)) if initial_state is None else initial_state.astype(float)
    output = np.zeros(x.shape)
    for row in range(rows):
        for channel in range(channels):
            h = state[row, channel].copy()
            for t in range(tokens):
                step, value = dt[row, t, channel], x[row, t, channel]
                h = np.exp(step * A[channel]) * h + step * value * B[row, t]
                output[row, t, channel] = h @ C[row, t] + D[channel] * value
            state[row, channel] = h
    return (output if gate is None else output * act_fn(gate.astype(float))), state
