"""The lightning indexer as a loop over queries and keys, in float64."""

import numpy as np


def sequences(rows, queries, keys, cum_seqlens_q=None, cum_seqlens_k=None):
    """For every batch row and query: the keys of its sequence, and its position among them; None for padding."""
    found = {}
    if cum_seqlens_q is None:
        return {(b, t): (range(keys), keys - queries + t) for b in range(rows) for t in range(queries)}
    cum_seqlens_k = cum_seqlens_q if cum_seqlens_k is None else cum_seqlens_k
    for n in range(len(cum_seqlens_q) - 1):
        count, length = (int(x[n + 1] - x[n]) for x in (cum_seqlens_q, cum_seqlens_k))
        row, query, key = (0, int(cum_seqlens_q[n]), int(cum_seqlens_k[n])) if rows == 1 else (n, 0, 0)
        for i in range(count):
            found[row, query + i] = range(key, key + length), length - count + i
    return found


def lightning_indexer(
    query,
    key,
    weights,
    top_k,
    softmax_scale,
    causal=True,
    sliding_window=None,
    cum_seqlens_q=None,
    cum_seqlens_k=None,
    key_scales=None,
    block_tables=None,
    kv_lens=None,
    q_positions=None,
    query_scales=None,
    block_size=1,
    local_blocks=0,
    rectify=True,
):
    """`lightning_indexer`: indices and scores."""
    (rows, queries, heads, _), keys = query.shape, key.shape[1]
    indices, scores = np.full((rows, queries, top_k), -1), np.full((rows, queries, top_k), -np.inf)
    left, right = (None, None) if sliding_window is None else sliding_window
    if block_tables is None:
        every_query = sequences(rows, queries, keys, cum_seqlens_q, cum_seqlens_k)
    else:
        every_query = requests(rows, queries, keys * block_tables.shape[1], cum_seqlens_q, kv_lens)
    for (b, t), (own, position) in every_query.items():
        position = position if q_positions is None else q_positions[b, t]
        candidates, blocks, last = [], {}, -1
        for at, s in enumerate(own):
            distance, place = at - position, (b, s) if block_tables is None else slot(s, block_tables[b], key)
            if causal and distance > 0:
                continue
            if (left is not None and -distance > left) or (right is not None and distance > right):
                continue
            last = at // block_size
            if place is None:
                continue
            score, scale = 0.0, softmax_scale * (1.0 if key_scales is None else float(key_scales[place]))
            for h in range(heads):
                product = scale * float(query[b, t, h].astype(np.float64) @ key[place].astype(np.float64))
                product = product if np.isnan(product) or not rectify else max(0.0, product)
                factor = 1.0 if query_scales is None else float(query_scales[b, t, h])
                score += factor * float(weights[b, t, h]) * product
            candidate = (not np.isnan(score), -score if not np.isnan(score) else 0.0, s)
            if block_size == 1:
                candidates.append(candidate)
            else:
                blocks.setdefault(at // block_size, []).append((*candidate[:2], at // block_size))
        local = range(last, last - local_blocks, -1)
        first = [(True, -np.inf, block) for block in local if block in blocks]
        candidates += [min(each) for block, each in blocks.items() if block not in local]
        for n, (is_number, negative, s) in enumerate((first + sorted(candidates))[:top_k]):
            indices[b, t, n], scores[b, t, n] = s, -negative if is_number else np.nan
    return indices, scores


def requests(rows, queries, capacity, cum_seqlens_q, kv_lens):
    """For every query of every request: the tokens of the request, and the query's position among them."""
    found = {}
    for b in range(rows):
        length = capacity if kv_lens is None else int(kv_lens[b])
        count = queries if cum_seqlens_q is None else int(cum_seqlens_q[b + 1] - cum_seqlens_q[b])
        found |= {(b, t): (range(length), length - count + t) for t in range(count)}
    return found


def slot(token, table, pages):
    """The page and the slot of a token; None for none."""
    page = int(table[token // pages.shape[1]])
    return (page, token % pages.shape[1]) if 0 <= page < pages.shape[0] else None
