# pyright: basic, reportAssignmentType=false, reportIndexIssue=false, reportOperatorIssue=false, reportAttributeAccessIssue=false
# pyright: reportArgumentType=false, reportCallIssue=false, reportOptionalMemberAccess=false, reportGeneralTypeIssues=false
"""The gradient of the bias: every program owns a part of it and sums over all that the bias broadcasts over."""

import triton
import triton.language as tl

from ejkernel_triton.tiled_attention.backward_kernels import tile_gradient
from ejkernel_triton.tiled_attention.backward_tile import load_queries, query_bases
from ejkernel_triton.tiled_attention.tile import of_head, of_keys, queries_at, visits_of


@triton.jit
def bias_kernel(
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
    dbias,
    spec: tl.constexpr,
    Q_BLOCK: tl.constexpr,
    K_BLOCK: tl.constexpr,
    Q_TILES: tl.constexpr,
    K_TILES: tl.constexpr,
    SIZES: tl.constexpr,
    per: tl.constexpr,
):
    """SIZES are the sizes of a row of the bias over head, query and key: 1 where it broadcasts.

    The grid has as many programs along an axis as the bias has tiles of it; where it broadcasts, one, which loops.
    """
    OWN_K: tl.constexpr = K_TILES if SIZES[2] > 1 else 1
    OWN_Q: tl.constexpr = Q_TILES if SIZES[1] > 1 else 1
    program = tl.program_id(0)
    k_tile = program % OWN_K
    q_tile = (program // OWN_K) % OWN_Q
    own_head = (program // (OWN_K * OWN_Q)) % SIZES[0]
    own_row = program // (OWN_K * OWN_Q * SIZES[0])
    sum = tl.zeros([Q_BLOCK, K_BLOCK], tl.float32)
    for b in range(per.DBIAS):
        batch = own_row * per.DBIAS + b
        for h in range(spec.H // SIZES[0]):
            head = own_head + h
            bases = query_bases(query, cotangent, shift, delta, argmax, batch, head, spec, per)
            k_base, v_base = of_keys(key, value, batch, head // spec.G, spec, per)
            bias_at, mask_at = of_head(bias, mask, batch, head, spec, per)
            keys = (k_base, v_base, k_ids, k_positions, bias_at, mask_at, dropped_columns)
            for i in range(Q_TILES // OWN_Q):
                tile = q_tile + i
                start = tile * Q_BLOCK
                described = queries_at(start, batch, head, q_ids, q_positions, dropped_rows, spec, per, Q_BLOCK, True)
                rows = load_queries(start, described, bases, spec, Q_BLOCK, True)
                first, _clear, _unclear, last = visits_of(visits, batch, tile, per, Q_TILES)
                lowest = tl.maximum(first, k_tile)
                highest = tl.minimum(last, k_tile + K_TILES // OWN_K)
                for n in tl.range(lowest, highest):
                    _, gradient = tile_gradient(n, rows, described, keys, batch, spec, per, K_BLOCK, True)
                    sum += gradient
    base = dbias + tl.cast(own_row, tl.int64) * spec.BIAS[0] + tl.cast(own_head, tl.int64) * spec.BIAS[1]
    _store(base, sum, q_tile * Q_BLOCK, k_tile * K_BLOCK, Q_BLOCK, K_BLOCK, SIZES)


@triton.jit
def _store(base, sum, q_start, k_start, Q_BLOCK: tl.constexpr, K_BLOCK: tl.constexpr, SIZES: tl.constexpr):
    """Sums [Q, K] over the axes that broadcast, and writes what is left."""
    q = q_start + tl.arange(0, Q_BLOCK)
    k = k_start + tl.arange(0, K_BLOCK)
    if SIZES[1] == 1:
        if SIZES[2] == 1:
            tl.store(base, tl.sum(tl.sum(sum, 1), 0).to(base.dtype.element_ty))
        else:
            tl.store(base + k, tl.sum(sum, 0).to(base.dtype.element_ty), mask=k < SIZES[2])
    else:
        if SIZES[2] == 1:
            tl.store(base + q, tl.sum(sum, 1).to(base.dtype.element_ty), mask=q < SIZES[1])
        else:
            at = base + (tl.cast(q, tl.int64)[:, None] * SIZES[2] + k[None, :])
            tl.store(at, sum.to(base.dtype.element_ty), mask=(q < SIZES[1])[:, None] & (k < SIZES[2])[None, :])
