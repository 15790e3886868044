"""Computes the divergences of student and teacher from their mixture, once both log-sum-exps are known."""

import triton
import triton.language as tl

from ejkernel_triton.cross_entropy.kernels.tile import load_token, locate_token, store_token, token_row
from ejkernel_triton.kl_divergence.kernels.tile import load_logit_pair, log_mixture, positive_or_zero


@triton.jit
def add_tile(sum_s, sum_t, student, teacher, lse_s, lse_t, start, IS_MASKED: tl.constexpr, spec: tl.constexpr):
    """Returns the sums of lanes with those of the tile from `start` on."""
    _, student_logits, teacher_logits = load_logit_pair(student, teacher, start, IS_MASKED, spec)
    log_p, log_q = student_logits - lse_s, teacher_logits - lse_t
    p, q = tl.exp2(log_p), tl.exp2(log_q)
    log_m = log_mixture(p, q, spec)
    sum_s += tl.sum(p * positive_or_zero(p, log_p - log_m), axis=0)
    return sum_s, sum_t + tl.sum(q * positive_or_zero(q, log_q - log_m), axis=0)


@triton.jit
def mixture_divergence_kernel(
    student,
    teacher,
    token_mask,
    student_lse,
    teacher_lse,
    student_divergence,
    teacher_divergence,
    spec: tl.constexpr,
    per: tl.constexpr,
):
    """Computes KL(student, mixture) and KL(teacher, mixture) of one token to base 2, [T] float32; 0 for tokens that do
    not count.
    """
    V: tl.constexpr = spec.V
    LANES: tl.constexpr = spec.LANES
    TILE: tl.constexpr = spec.STRIPS * spec.LANES
    WHOLE: tl.constexpr = V // TILE * TILE
    batch, token = locate_token(spec)
    active = load_token(token_mask, batch, token, per.TOKEN_MASK, spec) != 0
    student = token_row(student, batch, token, per.STUDENT, spec)
    teacher = token_row(teacher, batch, token, per.TEACHER, spec)
    lse_s = load_token(student_lse, batch, token, per.STUDENT_LSE, spec)
    lse_t = load_token(teacher_lse, batch, token, per.TEACHER_LSE, spec)
    sum_s = tl.zeros([LANES], tl.float32)
    sum_t = tl.zeros([LANES], tl.float32)
    for start in tl.range(0, tl.where(active, WHOLE, 0), TILE):
        sum_s, sum_t = add_tile(sum_s, sum_t, student, teacher, lse_s, lse_t, start, False, spec)
    for start in tl.range(WHOLE, tl.where(active, V, WHOLE), TILE):
        sum_s, sum_t = add_tile(sum_s, sum_t, student, teacher, lse_s, lse_t, start, True, spec)
    store_token(student_divergence, batch, token, tl.sum(sum_s, axis=0), spec)
    store_token(teacher_divergence, batch, token, tl.sum(sum_t, axis=0), spec)
