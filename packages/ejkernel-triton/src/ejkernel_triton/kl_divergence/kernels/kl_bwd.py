"""Computes the gradient of the student's logits, with one read of both logits and one write."""

import triton
import triton.language as tl

from ejkernel_triton.blocks import LN2
from ejkernel_triton.cross_entropy.kernels.tile import load_token, locate_token, token_row
from ejkernel_triton.kl_divergence.kernels.tile import load_logit_pair, log_mixture, positive_or_zero


@triton.jit
def store_gradient_tile(gradient, teacher, factors, start, IS_MASKED: tl.constexpr, spec: tl.constexpr):
    """Computes the gradient of the student's logits from `start` on, whose memory it reuses."""
    lse_s, lse_t, divergence, factor = factors
    entries, student_logits, teacher_logits = load_logit_pair(gradient, teacher, start, IS_MASKED, spec)
    log_p, log_q = student_logits - lse_s, teacher_logits - lse_t
    p = tl.exp2(log_p)
    if spec.DIRECTION == "forward":
        result = p - tl.exp2(log_q)
    else:
        log_other = log_q
        if spec.DIRECTION == "jsd":
            log_other = log_mixture(p, tl.exp2(log_q), spec)
        result = p * (positive_or_zero(p, log_p - log_other) - divergence) * LN2
    result = (result * factor).to(gradient.dtype.element_ty)
    if IS_MASKED:
        tl.store(gradient + entries, result, mask=entries < spec.V)
    else:
        tl.store(gradient + entries, result)


@triton.jit
def kl_bwd_kernel(
    student,
    teacher,
    token_mask,
    student_lse,
    teacher_lse,
    divergence,
    gradient_factor,
    gradient,
    spec: tl.constexpr,
    per: tl.constexpr,
):
    """Computes the gradient of one token's student logits, [V]; 0 for a token that does not count.

    `gradient` aliases `student`. `divergence` is that of the student from the other distribution of the logarithm: the
    teacher or the mixture.
    """
    V: tl.constexpr = spec.V
    STRIPS: tl.constexpr = spec.STRIPS
    LANES: tl.constexpr = spec.LANES
    TILE: tl.constexpr = STRIPS * LANES
    WHOLE: tl.constexpr = V // TILE * TILE
    batch, token = locate_token(spec)
    active = load_token(token_mask, batch, token, per.TOKEN_MASK, spec) != 0
    gradient = token_row(gradient, batch, token, per.GRADIENT, spec)
    teacher = token_row(teacher, batch, token, per.TEACHER, spec)
    factors = (
        load_token(student_lse, batch, token, per.STUDENT_LSE, spec),
        load_token(teacher_lse, batch, token, per.TEACHER_LSE, spec),
        load_token(divergence, batch, token, per.DIVERGENCE, spec),
        load_token(gradient_factor, batch, token, per.GRADIENT_FACTOR, spec),
    )
    for start in tl.range(0, tl.where(active, WHOLE, 0), TILE):
        store_gradient_tile(gradient, teacher, factors, start, False, spec)
    for start in tl.range(WHOLE, tl.where(active, V, WHOLE), TILE):
        store_gradient_tile(gradient, teacher, factors, start, True, spec)
    zeros = tl.zeros([STRIPS, LANES], gradient.dtype.element_ty)
    for start in tl.range(0, tl.where(active, 0, V), TILE):
        entries = start + tl.arange(0, STRIPS)[:, None] * LANES + tl.arange(0, LANES)[None, :]
        tl.store(gradient + entries, zeros, mask=entries < V)
