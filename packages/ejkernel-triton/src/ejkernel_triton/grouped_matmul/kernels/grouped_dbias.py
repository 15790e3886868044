"""Computes sums over the rows of each group: the gradients of the biases."""

import triton
import triton.language as tl

from ejkernel_triton.blocks import at_batch
from ejkernel_triton.grouped_matmul.kernels.grouped_gemm_drhs import group_bounds
from ejkernel_triton.grouped_matmul.kernels.tile import bounded


@triton.jit
def grouped_dbias_kernel(cotangent, bounds, output, spec: tl.constexpr, per: tl.constexpr):
    """Sums BLOCK_Q columns of the cotangent over the rows of one group."""
    across: tl.constexpr = (spec.WIDTH + spec.BLOCK_Q - 1) // spec.BLOCK_Q
    program = tl.program_id(0)
    batch = tl.cast(program // (spec.MATRICES * across), tl.int64)
    matrix = program // across % spec.MATRICES
    cotangent = at_batch(cotangent, batch, per.COTANGENT, spec.ROWS * spec.WIDTH)
    bounds = at_batch(bounds, batch, per.BOUNDS, spec.MATRICES * 2)
    output += batch * spec.MATRICES * spec.WIDTH
    first, end = group_bounds(bounds, matrix)
    q, in_q = bounded((program % across) * spec.BLOCK_Q, spec.BLOCK_Q, spec.WIDTH)
    k = tl.arange(0, spec.BLOCK_K)
    # One partial sum per row of the step: threads add to their own elements, and are reduced once after the loop.
    BLOCK_K: tl.constexpr = spec.BLOCK_K
    BLOCK_Q: tl.constexpr = spec.BLOCK_Q
    acc = tl.zeros([BLOCK_K, BLOCK_Q], tl.float32)
    at = cotangent + tl.cast(first, tl.int64) * spec.WIDTH + (k[:, None] * spec.WIDTH + q[None, :])
    for start in tl.range(first, end, spec.BLOCK_K):
        in_group = (k < end - start)[:, None] & in_q[None, :]
        acc += tl.load(at, mask=in_group, other=0.0).to(tl.float32)
        at += spec.BLOCK_K * spec.WIDTH
    tl.store(output + matrix * spec.WIDTH + q, tl.sum(acc, 0), mask=in_q)
