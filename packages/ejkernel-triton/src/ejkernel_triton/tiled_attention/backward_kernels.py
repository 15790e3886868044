# pyright: basic, reportIndexIssue=false, reportOperatorIssue=false, reportAttributeAccessIssue=false
# pyright: reportArgumentType=false, reportCallIssue=false, reportOptionalMemberAccess=false, reportGeneralTypeIssues=false
"""The backward kernels, by recomputation of the scores (Dao et al. 2022): one for keys and values, one for queries.

Each program owns the gradient that it writes, so nothing is added atomically and two runs agree to the bit.
"""

import triton
import triton.language as tl

from ejkernel_triton.tiled_attention.backward_tile import load_queries, query_bases, score_gradient, weights_of
from ejkernel_triton.tiled_attention.tile import (
    across,
    add_product,
    down,
    drop,
    keys_at,
    load_tile,
    of_head,
    of_keys,
    product_of_rows,
    queries_at,
    store_tile,
    visits_of,
)


@triton.jit
def keys_kernel(
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
    cotangent,
    shift,
    delta,
    argmax,
    dkey,
    dvalue,
    spec: tl.constexpr,
    Q_BLOCK: tl.constexpr,
    K_BLOCK: tl.constexpr,
    TILES: tl.constexpr,
    per: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
):
    """A program owns K_BLOCK keys of one KV head and sums over its query heads; tiles are [keys, queries].

    It computes the gradient of the keys if DK and that of the values if DV: both, where registers hold both.
    """
    BD: tl.constexpr = spec.BD
    BV: tl.constexpr = spec.BV
    program = tl.program_id(0)
    tile = program % TILES
    kv_head = (program // TILES) % spec.HK
    batch = program // (TILES * spec.HK)
    start = tile * K_BLOCK
    described = keys_at(start, batch, k_ids, k_positions, dropped_columns, spec, per, K_BLOCK, True)
    _, real, _, _, _ = described
    k_base, v_base = of_keys(key, value, batch, kv_head, spec, per)
    k = load_tile(k_base, start, real, spec.HK * spec.D, spec.D, K_BLOCK, BD, True)
    v = k
    if DK:
        v = load_tile(v_base, start, real, spec.HK * spec.DV, spec.DV, K_BLOCK, BV, True)
    keys = (k, k_base, start, real, spec.HK * spec.D), (v, v_base, start, real, spec.HK * spec.DV), described
    dk = tl.zeros([K_BLOCK, BD], tl.float32)
    dv = tl.zeros([K_BLOCK, BV], tl.float32)
    first, clear, unclear, last = visits_of(visits, batch, tile, per, TILES)
    before = clear - first
    for member in range(spec.G):
        head = kv_head * spec.G + member
        bases = query_bases(query, cotangent, shift, delta, argmax, batch, head, spec, per)
        bias_at, mask_at = of_head(bias, mask, batch, head, spec, per)
        about = (q_ids, q_positions, dropped_rows, bias_at, mask_at)
        # The loop with masks comes first: the compiler keeps all of its values in registers then.
        for n in tl.range(0, before + last - unclear):
            at = tl.where(n < before, first + n, unclear + n - before)
            dk, dv = _visit_queries(
                at, keys, batch, head, bases, about, dk, dv, spec, per, Q_BLOCK, DK, DV, MASKED=True
            )
        for n in tl.range(clear, unclear):
            dk, dv = _visit_queries(
                n, keys, batch, head, bases, about, dk, dv, spec, per, Q_BLOCK, DK, DV, MASKED=False
            )
    row = tl.cast(batch, tl.int64) * spec.S * spec.HK + kv_head
    if DK:
        store_tile(dkey + row * spec.D, start, dk * spec.SCALE, spec.HK * spec.D, spec.S, spec.D, K_BLOCK, BD)
    if DV:
        store_tile(dvalue + row * spec.DV, start, dv * spec.KEPT, spec.HK * spec.DV, spec.S, spec.DV, K_BLOCK, BV)


@triton.jit
def _visit_queries(
    n,
    keys,
    batch,
    head,
    bases,
    about,
    dk,
    dv,
    spec: tl.constexpr,
    per: tl.constexpr,
    Q_BLOCK: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Adds what query tile n contributes to dk [K, BD] and dv [K, BV]."""
    k, v, owned = keys
    q_ids, q_positions, numbers, bias, mask = about
    start = n * Q_BLOCK
    described = queries_at(start, batch, head, q_ids, q_positions, numbers, spec, per, Q_BLOCK, MASKED)
    queries, rows = across(described), down(owned)
    q, do, row_shift, row_delta, row_argmax = load_queries(start, described, bases, spec, Q_BLOCK, MASKED)
    products = product_of_rows(k, q, spec.D, spec)
    weights, slope = weights_of(products, queries, rows, row_shift[None, :], bias, mask, spec, MASKED)
    q_tile, _, _, _, _ = q
    do_tile, _, _, _, _ = do
    if DV:
        dv = add_product(dv, drop(weights, queries, rows, spec).to(do_tile.dtype), do_tile, spec)
    if DK:
        gradient = score_gradient(weights, slope, v, do, queries, rows, row_delta[None, :], row_argmax[None, :], spec)
        dk = add_product(dk, gradient.to(q_tile.dtype), q_tile, spec)
    return dk, dv


@triton.jit
def queries_kernel(
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
    cotangent,
    shift,
    delta,
    argmax,
    dquery,
    spec: tl.constexpr,
    Q_BLOCK: tl.constexpr,
    K_BLOCK: tl.constexpr,
    TILES: tl.constexpr,
    per: tl.constexpr,
    REVERSED: tl.constexpr,
):
    """A program owns Q_BLOCK queries of one head; tiles are [queries, keys]."""
    BD: tl.constexpr = spec.BD
    program = tl.program_id(0)
    tile = program % TILES
    if REVERSED:  # later queries see more keys: they begin first
        tile = TILES - 1 - tile
    head = (program // TILES) % spec.H
    batch = program // (TILES * spec.H)
    start = tile * Q_BLOCK
    described = queries_at(start, batch, head, q_ids, q_positions, dropped_rows, spec, per, Q_BLOCK, True)
    bases = query_bases(query, cotangent, shift, delta, argmax, batch, head, spec, per)
    rows = load_queries(start, described, bases, spec, Q_BLOCK, True)
    k_base, v_base = of_keys(key, value, batch, head // spec.G, spec, per)
    bias_at, mask_at = of_head(bias, mask, batch, head, spec, per)
    keys = (k_base, v_base, k_ids, k_positions, bias_at, mask_at, dropped_columns)
    dq = tl.zeros([Q_BLOCK, BD], tl.float32)
    first, clear, unclear, last = visits_of(visits, batch, tile, per, TILES)
    before = clear - first
    for n in tl.range(0, before + last - unclear):
        at = tl.where(n < before, first + n, unclear + n - before)
        dq = _visit_keys(at, rows, described, keys, batch, dq, spec, per, K_BLOCK, MASKED=True)
    for n in tl.range(clear, unclear):
        dq = _visit_keys(n, rows, described, keys, batch, dq, spec, per, K_BLOCK, MASKED=False)
    base = dquery + (tl.cast(batch, tl.int64) * spec.T * spec.H + head) * spec.D
    store_tile(base, start, dq * spec.SCALE, spec.H * spec.D, spec.T, spec.D, Q_BLOCK, BD)


@triton.jit
def _visit_keys(
    n,
    rows,
    queries,
    keys,
    batch,
    dq,
    spec: tl.constexpr,
    per: tl.constexpr,
    K_BLOCK: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Adds what key tile n contributes to dq [Q, BD]."""
    k, gradient = tile_gradient(n, rows, queries, keys, batch, spec, per, K_BLOCK, MASKED)
    return add_product(dq, gradient.to(k.dtype), k, spec)


@triton.jit
def tile_gradient(
    n,
    rows,
    queries,
    keys,
    batch,
    spec: tl.constexpr,
    per: tl.constexpr,
    K_BLOCK: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Key tile n [K, BD], and the gradient of the scores of a query tile with it, [Q, K]."""
    BD: tl.constexpr = spec.BD
    BV: tl.constexpr = spec.BV
    q, do, row_shift, row_delta, row_argmax = rows
    k_base, v_base, k_ids, k_positions, bias, mask, numbers = keys
    start = n * K_BLOCK
    described = keys_at(start, batch, k_ids, k_positions, numbers, spec, per, K_BLOCK, MASKED)
    _, real, _, _, _ = described
    left, columns = down(queries), across(described)
    k = load_tile(k_base, start, real, spec.HK * spec.D, spec.D, K_BLOCK, BD, MASKED)
    v = load_tile(v_base, start, real, spec.HK * spec.DV, spec.DV, K_BLOCK, BV, MASKED)
    k_side = (k, k_base, start, real, spec.HK * spec.D)
    v_side = (v, v_base, start, real, spec.HK * spec.DV)
    products = product_of_rows(q, k_side, spec.D, spec)
    weights, slope = weights_of(products, left, columns, row_shift[:, None], bias, mask, spec, MASKED)
    gradient = score_gradient(weights, slope, do, v_side, left, columns, row_delta[:, None], row_argmax[:, None], spec)
    return k, gradient
