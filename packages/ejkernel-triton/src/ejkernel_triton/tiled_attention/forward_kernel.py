# pyright: basic, reportIndexIssue=false, reportOperatorIssue=false, reportAttributeAccessIssue=false
# pyright: reportArgumentType=false, reportCallIssue=false, reportOptionalMemberAccess=false, reportGeneralTypeIssues=false
"""The forward kernel: online softmax of one query tile over the key tiles that it visits.

Sources: Milakov & Gimelshein 2018 (online softmax); Dao 2023, arXiv:2307.08691 (order of the loops).
"""

import triton
import triton.language as tl

from ejkernel_triton.tiled_attention.tile import (
    LN2,
    LOG2E,
    LOWEST,
    across,
    add_product,
    allowed,
    down,
    drop,
    finite,
    keys_at,
    load_tile,
    of_head,
    of_keys,
    powers,
    product,
    product_of_rows,
    queries_at,
    store_tile,
    transform,
    visits_of,
)

LEAST = tl.constexpr(-3.4028234663852886e38)  # of float32


@triton.jit
def forward_kernel(
    query,
    key,
    value,
    visits,
    q_ids,
    k_ids,
    q_positions,
    k_positions,
    bias,
    mask,
    sinks,
    dropped_rows,
    dropped_columns,
    output,
    lse,
    row_max,
    row_argmax,
    spec: tl.constexpr,
    Q_BLOCK: tl.constexpr,
    K_BLOCK: tl.constexpr,
    TILES: tl.constexpr,
    per: tl.constexpr,
    REVERSED: tl.constexpr,
):
    """A program owns Q_BLOCK queries of one head; consecutive programs share keys and values.

    `row_max` and `row_argmax` are None for normalised outputs.
    """
    BD: tl.constexpr = spec.BD
    BV: tl.constexpr = spec.BV
    program = tl.program_id(0)
    tile = program % TILES
    if REVERSED:  # later queries see more keys: they begin first
        tile = TILES - 1 - tile
    head = (program // TILES) % spec.H
    batch = program // (TILES * spec.H)
    start = tile * Q_BLOCK
    described = queries_at(start, batch, head, q_ids, q_positions, dropped_rows, spec, per, Q_BLOCK, True)
    index, _, _, _, _ = described
    queries = down(described)
    q_base = query + (tl.cast(batch // per.QUERY, tl.int64) * spec.T * spec.H + head) * spec.D
    q = load_tile(q_base, start, index < spec.T, spec.H * spec.D, spec.D, Q_BLOCK, BD, spec.T % Q_BLOCK > 0)
    q_side = (q, q_base, start, index < spec.T, spec.H * spec.D)
    k_base, v_base = of_keys(key, value, batch, head // spec.G, spec, per)
    bias_at, mask_at = of_head(bias, mask, batch, head, spec, per)
    keys = (k_base, v_base, k_ids, k_positions, bias_at, mask_at, dropped_columns)
    peak = tl.full([Q_BLOCK], float("-inf"), tl.float32)
    argpeak = tl.zeros([Q_BLOCK], tl.int32)
    total = tl.zeros([Q_BLOCK], tl.float32)
    sum = tl.zeros([Q_BLOCK, BV], tl.float32)
    first, clear, unclear, last = visits_of(visits, batch, tile, per, TILES)
    for n in tl.range(clear, unclear):
        peak, argpeak, total, sum = _visit(
            n, q_side, queries, keys, batch, peak, argpeak, total, sum, spec, per, K_BLOCK, MASKED=False
        )
    before = clear - first
    for n in tl.range(0, before + last - unclear):
        at = tl.where(n < before, first + n, unclear + n - before)
        peak, argpeak, total, sum = _visit(
            at, q_side, queries, keys, batch, peak, argpeak, total, sum, spec, per, K_BLOCK, MASKED=True
        )
    row = tl.cast(batch, tl.int64)
    rows = (row * spec.H + head) * spec.T + index
    sink = sinks
    if spec.SINKS:
        sink = sinks + (batch // per.SINKS) * spec.H + head
    _finish(output, lse, row_max, row_argmax, rows, sink, head, row, start, peak, argpeak, total, sum, spec, Q_BLOCK)


@triton.jit
def _visit(
    n,
    q_side,
    queries,
    keys,
    batch,
    peak,
    argpeak,
    total,
    sum,
    spec: tl.constexpr,
    per: tl.constexpr,
    K_BLOCK: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Takes key tile n into the running softmax.

    Tile of q_side [Q, BD]; peak, argpeak, total [Q]; sum [Q, BV]; scores and weights [Q, K].
    """
    BD: tl.constexpr = spec.BD
    BV: tl.constexpr = spec.BV
    q, _, _, _, _ = q_side
    k_base, v_base, k_ids, k_positions, bias, mask, numbers = keys
    start = n * K_BLOCK
    described = keys_at(start, batch, k_ids, k_positions, numbers, spec, per, K_BLOCK, MASKED)
    k_index, real, _, _, _ = described
    columns = across(described)
    k = load_tile(k_base, start, real, spec.HK * spec.D, spec.D, K_BLOCK, BD, MASKED)
    if BD > 128:
        k_side = (k, k_base, start, real, spec.HK * spec.D)
        products = product_of_rows(q_side, k_side, spec.D, spec)
    else:
        products = product(q, tl.trans(k), spec)
    scores, _ = transform(products, queries, columns, bias, spec)
    if MASKED:
        scores = tl.where(allowed(queries, columns, mask, spec), scores, float("-inf"))
    largest = tl.max(scores, 1)
    risen = tl.maximum(peak, powers(largest, spec))
    if spec.NORMALIZE:
        pass
    else:
        here = tl.min(tl.where(scores == largest[:, None], k_index[None, :], 0x7FFFFFFF), 1)
        tied = tl.minimum(argpeak, here)
        known = powers(largest, spec)
        argpeak = tl.where(known > peak, here, tl.where(known < peak, argpeak, tied))
    shift = risen
    if MASKED or spec.BIAS is not None:
        shift = finite(risen)
    weights = tl.exp2(powers(scores, spec) - shift[:, None])
    fade = tl.exp2(peak - shift)
    total = total * fade + tl.sum(weights, 1)
    weights = drop(weights, queries, columns, spec)
    v = load_tile(v_base, start, real, spec.HK * spec.DV, spec.DV, K_BLOCK, BV, MASKED)
    sum = add_product(sum * fade[:, None], weights.to(v.dtype), v, spec)
    return risen, argpeak, total, sum


@triton.jit
def _finish(
    output,
    lse,
    row_max,
    row_argmax,
    rows,
    sink_at,
    head,
    row,
    start,
    peak,
    argpeak,
    total,
    sum,
    spec: tl.constexpr,
    Q_BLOCK: tl.constexpr,
):
    """Divides, takes the sink into the denominator, and stores. `rows` are places in [B, H, T]."""
    keep = start + tl.arange(0, Q_BLOCK) < spec.T
    base = finite(peak)
    factor = tl.full([Q_BLOCK], 1.0, tl.float32)
    if spec.SINKS:
        sink = tl.load(sink_at) * LOG2E
        base = finite(tl.maximum(peak, sink))
        factor = tl.exp2(peak - base)
        total = total * factor + tl.exp2(sink - base)
    some = tl.where(total > 0.0, total, 1.0)
    logs = tl.where(total > 0.0, _natural(tl.log2(some) + base, base, spec), float("-inf"))
    tl.store(lse + rows, logs, mask=keep)
    if spec.NORMALIZE:
        sum = sum * (factor * spec.KEPT / some)[:, None]
    else:
        sum = sum * spec.KEPT
        tl.store(row_max + rows, _natural(finite(peak), peak, spec), mask=keep)
        tl.store(row_argmax + rows, argpeak, mask=keep)
    BV: tl.constexpr = spec.BV
    out_base = output + (row * spec.T * spec.H + head) * spec.DV
    store_tile(out_base, start, sum, spec.H * spec.DV, spec.T, spec.DV, Q_BLOCK, BV)


@triton.jit
def _natural(power, base, spec: tl.constexpr):
    """A power of two as one of e; the least number there is where a bias hides all that its row has."""
    if spec.BIASED:
        return tl.where(base == LOWEST, LEAST, power * LN2)
    else:
        return power * LN2
