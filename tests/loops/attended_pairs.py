"""Which pairs of query and key attend, decided one pair at a time."""

import numpy as np


def attended(call) -> np.ndarray:
    """Returns which pairs of a tiled-attention record of two rows attend, bool [2, T, S]."""
    queries, keys = call.query.shape[1], call.key.shape[1]
    left, right = call.sliding_window or (None, None)
    pairs = np.zeros((2, queries, keys), bool)
    for b, i, j in np.ndindex(pairs.shape):
        q = i if call.q_positions is None else int(call.q_positions[b, i])
        near = (left is None or j >= q - left) and (right is None or j <= q + right) and (not call.causal or j <= q)
        ids = (0, 0) if call.q_segment_ids is None else (call.q_segment_ids[b, i], call.kv_segment_ids[b, j])
        pairs[b, i, j] = near and ids[0] == ids[1] >= 0
    return pairs
