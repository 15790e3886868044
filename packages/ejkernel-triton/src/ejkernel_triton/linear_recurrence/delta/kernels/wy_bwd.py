"""Computes gradients through the inverse of the WY form; the formulas are in `chunk_bwd_dhu`."""

import triton
import triton.language as tl

from ejkernel_triton.blocks import dot
from ejkernel_triton.linear_recurrence.chunked.kernels.chunk_bwd_dv import store_tokens
from ejkernel_triton.linear_recurrence.kernels.tile import (
    chunk_base,
    chunk_span,
    load_dt,
    load_rows,
    scores_at,
    store_rows,
)


@triton.jit
def wy_bwd_kernel(
    value,
    beta,
    inverse,
    dv_new,
    starts,
    ends,
    dy,
    dvalue,
    dbeta,
    spec: tl.constexpr,
    per: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Computes dy = (I + L)^-T dx of one head's chunk, dv = beta dy and <dy, v>."""
    C: tl.constexpr = spec.CHUNK
    program = tl.program_id(0)
    head = program % spec.H
    program = program // spec.H
    chunk = program % spec.CHUNKS
    row = program // spec.CHUNKS
    start, end = chunk_span(starts, ends, row, chunk, spec, per)
    v_base = chunk_base(value, row // per.VALUE, start, head // (spec.H // spec.HV), spec.T, spec.HV, spec.V)
    x_base = chunk_base(dv_new, row // per.DV_NEW, start, head, spec.T, spec.H, spec.V)
    betas = load_dt(beta, row // per.BETA, start, end, head, spec)
    t = tl.load(scores_at(inverse, row, head, chunk, spec))
    sums = tl.zeros([C], tl.float32)
    for v_start in tl.range(0, spec.V, BLOCK_V):
        dx = load_rows(x_base, start, end, v_start, spec.H, spec.V, BLOCK_V, spec)
        v = load_rows(v_base, start, end, v_start, spec.HV, spec.V, BLOCK_V, spec)
        dy_tile = dot(tl.trans(t.to(dx.dtype)), dx, spec)
        # Computed in float32, before dy is rounded to be stored.
        sums += tl.sum(dy_tile * v.to(tl.float32), 1)
        to = chunk_base(dy, row, start, head, spec.T, spec.H, spec.V)
        store_rows(to, dy_tile, start, end, v_start, spec.H, spec.V, spec)
        to = chunk_base(dvalue, row, start, head, spec.T, spec.H, spec.V)
        store_rows(to, dy_tile * betas[:, None], start, end, v_start, spec.H, spec.V, spec)
    store_tokens(dbeta, sums, row, start, end, 0, 1, head, spec)
