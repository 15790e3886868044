"""Computes gradients through the inverse of the WY form; the formulas are in `chunk_bwd_dhu`."""

import triton
import triton.language as tl

from ejkernel_triton.blocks import dot
from ejkernel_triton.linear_recurrence.chunked.kernels.chunk_bwd_dv import store_token_scalars
from ejkernel_triton.linear_recurrence.kernels.tile import (
    chunk_address,
    chunk_start_and_sequence_end,
    load_token_rows,
    load_token_scalars,
    score_pointers,
    store_token_rows,
)


@triton.jit
def wy_bwd_kernel(
    value,
    beta,
    inverse,
    dv_new,
    chunk_starts,
    sequence_ends,
    dy,
    dvalue,
    dbeta,
    spec: tl.constexpr,
    per: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Computes dy = (I + L)^-T dx of one head's chunk, dv = beta dy and <dy, v>."""
    CHUNK: tl.constexpr = spec.CHUNK_SIZE
    program = tl.program_id(0)
    head = program % spec.H
    program = program // spec.H
    chunk = program % spec.NUM_CHUNKS
    row = program // spec.NUM_CHUNKS
    first_token, sequence_end = chunk_start_and_sequence_end(chunk_starts, sequence_ends, row, chunk, spec, per)
    value_base = chunk_address(
        value, row // per.VALUE, first_token, head // (spec.H // spec.HV), spec.T, spec.HV, spec.V
    )
    v_new_base = chunk_address(dv_new, row // per.DV_NEW, first_token, head, spec.T, spec.H, spec.V)
    betas = load_token_scalars(beta, row // per.BETA, first_token, sequence_end, head, spec)
    inverse_tile = tl.load(score_pointers(inverse, row, head, chunk, spec))
    sums = tl.zeros([CHUNK], tl.float32)
    for v_start in tl.range(0, spec.V, BLOCK_V):
        dx = load_token_rows(v_new_base, first_token, sequence_end, v_start, spec.H, spec.V, BLOCK_V, spec)
        v = load_token_rows(value_base, first_token, sequence_end, v_start, spec.HV, spec.V, BLOCK_V, spec)
        dy_tile = dot(tl.trans(inverse_tile.to(dx.dtype)), dx, spec)
        # Computed in float32, before dy is rounded to be stored.
        sums += tl.sum(dy_tile * v.to(tl.float32), 1)
        output_base = chunk_address(dy, row, first_token, head, spec.T, spec.H, spec.V)
        store_token_rows(output_base, dy_tile, first_token, sequence_end, v_start, spec.H, spec.V, spec)
        output_base = chunk_address(dvalue, row, first_token, head, spec.T, spec.H, spec.V)
        store_token_rows(
            output_base, dy_tile * betas[:, None], first_token, sequence_end, v_start, spec.H, spec.V, spec
        )
    store_token_scalars(dbeta, sums, row, first_token, sequence_end, 0, 1, head, spec)
