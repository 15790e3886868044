"""RWKV's time mixing as float64 NumPy loops over sequences, heads and tokens, written from the formulas."""

import itertools

import numpy as np


def sequences(r, v, initial_state, cu_seqlens, reverse, step):
    """Outputs [B, T, H, V] and final states of all sequences.

    Args:
        r: [B, T, H, K].
        v: [B, T, Hk, V].
        initial_state: [sequences, H, K, V] or None.
        cu_seqlens: Cumulative lengths of the sequences of one row, or None.
        reverse: Whether time runs backwards.
        step: (state [K, V], row, token, head) -> output [V] and the state after it.
    """
    (rows, tokens, heads, channels), width = r.shape, v.shape[3]
    spans = [(b, 0, tokens) for b in range(rows)]
    if cu_seqlens is not None:
        spans = [(0, int(a), int(z)) for a, z in itertools.pairwise(cu_seqlens)]
    output, states = np.zeros((rows, tokens, heads, width)), np.zeros((len(spans), heads, channels, width))
    if initial_state is not None:
        states[:] = initial_state
    for (n, (b, first, end)), h in itertools.product(enumerate(spans), range(heads)):
        for t in reversed(range(first, end)) if reverse else range(first, end):
            output[b, t, h], states[n, h] = step(states[n, h], b, t, h)
    return output, states


def rwkv4(w, u, k, v, state=None):
    """`rwkv4`: outputs and the state after the last token, from logarithms of weights and sums over all pairs."""
    (rows, tokens, channels), decay = k.shape, -np.exp(w)
    output, last = np.zeros(k.shape), np.zeros((rows, 3, channels))
    for b, c in np.ndindex(rows, channels):
        values, logs, row_max = [], [], -1e30
        if state is not None:
            a, total, row_max = state[b, :, c]
            values, logs = [a / total], [np.log(total) + row_max]
        for t in range(tokens):
            every, now = np.array([*logs, u[c] + k[b, t, c]]), np.array([*values, v[b, t, c]])
            weights = np.exp(every - every.max())
            output[b, t, c] = weights @ now / weights.sum()
            logs, values = [*(x + decay[c] for x in logs), k[b, t, c]], [*values, v[b, t, c]]
            row_max = max(row_max + decay[c], k[b, t, c])
        weights = np.exp(np.array(logs) - row_max)
        last[b, :, c] = weights @ np.array(values), weights.sum(), row_max
    return output, last


def rwkv6(r, k, v, w, u, initial_state=None, cu_seqlens=None, reverse=False, softmax_scale=None):
    """`rwkv6`: outputs and final states."""
    shared, scale = r.shape[2] // k.shape[2], r.shape[3] ** -0.5 if softmax_scale is None else softmax_scale

    def step(state, b, t, h):
        write = np.outer(k[b, t, h // shared], v[b, t, h // shared])
        read = scale * (r[b, t, h] @ (state + u[h][:, None] * write))
        return read, np.exp(w[b, t, h])[:, None] * state + write

    return sequences(r, v, initial_state, cu_seqlens, reverse, step)


def rwkv7(r, w, k, v, a, b, initial_state=None, cu_seqlens=None, reverse=False, softmax_scale=None):
    """`rwkv7`: outputs and final states."""
    shared, scale = r.shape[2] // k.shape[2], r.shape[3] ** -0.5 if softmax_scale is None else softmax_scale

    def step(state, n, t, h):
        transition = np.diag(np.exp(w[n, t, h])) + np.outer(a[n, t, h], b[n, t, h])
        state = transition @ state + np.outer(k[n, t, h // shared], v[n, t, h // shared])
        return scale * (r[n, t, h] @ state), state

    return sequences(r, v, initial_state, cu_seqlens, reverse, step)


def rwkv7_mul(r, w, k, v, kk, a, **options):
    """`rwkv7_mul`: outputs and final states."""
    return rwkv7(r, w, k, v, kk * a, -kk, **options)
