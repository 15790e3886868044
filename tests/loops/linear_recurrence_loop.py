"""Linear recurrences as float64 NumPy loops over rows, heads and tokens, written from the formulas."""

import itertools

import numpy as np


def run(query, key, value, log_decay, scale, *, log_value_decay=None, beta=None, state=None, fresh=None, real=None):
    """One row: outputs [T, H, V] and the state [H, K, V] after it.

    Args:
        query: [T, H, K].
        key: [T, Hk, K].
        value: [T, Hk, V].
        log_decay: [T, H, K].
        scale: Factor on the output.
        log_value_decay: [T, H, V].
        beta: [T, H].
        state: [H, K, V] before the first token.
        fresh: [T] bool, tokens that forget everything before them.
        real: [T] bool, tokens that count.
    """
    tokens, heads, channels = query.shape
    shared = heads // key.shape[1]
    output = np.zeros((tokens, heads, value.shape[2]))
    final = np.zeros((heads, channels, value.shape[2])) if state is None else np.array(state, np.float64)
    for h in range(heads):
        s = final[h]
        for t in range(tokens):
            if real is not None and not real[t]:
                continue
            if fresh is not None and fresh[t]:
                s = np.zeros_like(s)
            k, v = key[t, h // shared], value[t, h // shared]
            s = np.exp(log_decay[t, h])[:, None] * s
            if log_value_decay is not None:
                s = s * np.exp(log_value_decay[t, h])[None, :]
            write = v if beta is None else beta[t, h] * (v - s.T @ k)
            s = s + np.outer(k, write)
            output[t, h] = scale * (s.T @ query[t, h])
        final[h] = s
    return output, final


def per_channel(gate, channels):
    """A log gate [..., H] or [..., H, K], for query's [..., H, K]."""
    gate = np.asarray(gate, np.float64)
    return gate if gate.ndim == channels.ndim else np.broadcast_to(gate[..., None], channels.shape)


def recurrent(
    query, key, value, g=None, g_gamma=None, gk=None, gv=None, initial_state=None, cu_seqlens=None, **options
):
    """`recurrent_attention`: outputs [B, T, H, V] and final states."""
    scale = options.get("softmax_scale") or query.shape[3] ** -0.5
    decay = np.zeros(query.shape)
    for gate in (g, gk):
        decay = decay if gate is None else decay + per_channel(gate, query)
    if g_gamma is not None:
        decay = decay + (g_gamma[None] if np.ndim(g_gamma) == 1 else g_gamma)[:, None, :, None]
    arrays = {"query": query, "key": key, "value": value, "log_decay": decay}
    if gv is not None:
        arrays["log_value_decay"] = gv
    rows, tokens = query.shape[:2]
    parts = [(b, 0, tokens) for b in range(rows)]
    if cu_seqlens is not None:
        parts = [(0, int(a), int(z)) for a, z in itertools.pairwise(cu_seqlens)]
    output, states = np.zeros((*query.shape[:3], value.shape[3])), []
    for n, (b, first, end) in enumerate(parts):
        order = slice(first, end)
        turn = slice(None, None, -1 if options.get("reverse") else 1)
        state = None if initial_state is None else initial_state[n]
        row, final = run(**{name: x[b, order][turn] for name, x in arrays.items()}, scale=scale, state=state)
        output[b, order] = row[turn]
        states.append(final)
    return output, np.stack(states)


def normalised(x):
    """x over its length."""
    return x / np.sqrt((x * x).sum(axis=-1, keepdims=True) + 1e-6)


def delta(query, key, value, beta, decay=None, seg_ids=None, initial_state=None, **options):
    """`kernel_delta_attention` and `gated_delta_rule`: outputs [B, T, H, V] and final states."""
    scale = options.get("softmax_scale") or query.shape[3] ** -0.5
    if options.get("use_qk_l2norm", True):
        query, key = normalised(query), normalised(key)
    log_decay = np.zeros(query.shape) if decay is None else per_channel(decay, query)
    rows = []
    for b in range(query.shape[0]):
        marks = {} if seg_ids is None else segments(seg_ids[b])
        state = None if initial_state is None else initial_state[b]
        row = run(query[b], key[b], value[b], log_decay[b], scale, beta=beta[b], state=state, **marks)
        rows.append(row)
    return tuple(np.stack(parts) for parts in zip(*rows, strict=True))


def segments(ids):
    """Which tokens of a row forget everything before them, and which count."""
    fresh, last = np.zeros(len(ids), bool), None
    for t, name in enumerate(ids):
        if name >= 0:
            fresh[t] = last is not None and name != last
            last = name
    return {"fresh": fresh, "real": np.asarray(ids) >= 0}


def ragged_delta(query, key, value, beta, decay, slots, starts, indices, **options):
    """`ragged_gated_delta_rule`: outputs [T, H, V] and slots."""
    slots, output = np.array(slots, np.float64), np.zeros((*query.shape[:2], value.shape[2]))
    new = slots.copy()
    for n, index in enumerate(indices):
        part = slice(int(starts[n]), int(starts[n + 1]))
        if part.start == part.stop:
            continue
        known = 0 <= index < len(slots)
        fields = (x[None, part] for x in (query, key, value, beta))
        state = slots[None, index] if known else None
        row, final = delta(*fields, None if decay is None else decay[None, part], initial_state=state, **options)
        output[part] = row[0]
        if known:
            new[index] = final[0]
    return output, new


def state_space(x, A, B, C, D, dt, gate=None, initial_state=None, act=None, rms_eps=None):
    """`state_space_v2`: outputs [B, T, H * P] and final states [B, H, P, E]."""
    rows, tokens, heads, width = x.shape
    shared = heads // B.shape[2]
    states = np.zeros((rows, heads, width, B.shape[3])) if initial_state is None else np.array(initial_state)
    y = np.zeros(x.shape)
    for b, h in np.ndindex(rows, heads):
        for t in range(tokens):
            step = dt[b, t, h]
            states[b, h] = np.exp(A[h] * step) * states[b, h] + step * np.outer(x[b, t, h], B[b, t, h // shared])
            y[b, t, h] = states[b, h] @ C[b, t, h // shared] + D[h] * x[b, t, h]
    y = y.reshape(rows, tokens, -1)
    if rms_eps is not None:
        y = y / np.sqrt((y * y).mean(axis=-1, keepdims=True) + rms_eps)
    return (y if gate is None else y * act(gate)), states
