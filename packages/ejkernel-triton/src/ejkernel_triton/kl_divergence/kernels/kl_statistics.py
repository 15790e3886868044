"""Computes what the divergences of tokens need of a vocabulary, with one read of both logits."""

import triton
import triton.language as tl

from ejkernel_triton.blocks import minus_inf_to_zero
from ejkernel_triton.cross_entropy.kernels.tile import load_token, locate_token, store_token, token_row
from ejkernel_triton.kl_divergence.kernels.tile import load_logit_pair, positive_or_zero


@triton.jit
def rescale(largest, values):
    """Returns (new largest numbers of lanes, factor for sums relative to the old ones, exponentials relative to the
    new ones), to base 2.
    """
    new_largest = tl.maximum(largest, tl.max(values, axis=0))
    relative = minus_inf_to_zero(new_largest)
    return new_largest, tl.exp2(largest - relative), tl.exp2(values - relative[None, :])


@triton.jit
def add_tile(
    student_largest,
    student_total,
    teacher_largest,
    teacher_total,
    difference,
    teacher_mean,
    student,
    teacher,
    start,
    IS_MASKED: tl.constexpr,
    spec: tl.constexpr,
):
    """Returns the statistics of lanes with those of the tile from `start` on. Sums are relative to the largest logit of
    the distribution that weights them.
    """
    _, student_logits, teacher_logits = load_logit_pair(student, teacher, start, IS_MASKED, spec)
    student_largest, student_factor, student_weights = rescale(student_largest, student_logits)
    teacher_largest, teacher_factor, teacher_weights = rescale(teacher_largest, teacher_logits)
    student_total = student_total * student_factor + tl.sum(student_weights, axis=0)
    teacher_total = teacher_total * teacher_factor + tl.sum(teacher_weights, axis=0)
    teacher_terms = teacher_weights * positive_or_zero(teacher_weights, teacher_logits)
    teacher_mean = teacher_mean * teacher_factor + tl.sum(teacher_terms, axis=0)
    if spec.DIRECTION == "forward":
        terms = teacher_weights * positive_or_zero(teacher_weights, teacher_logits - student_logits)
        difference = difference * teacher_factor + tl.sum(terms, axis=0)
    if spec.DIRECTION == "reverse":
        terms = student_weights * positive_or_zero(student_weights, student_logits - teacher_logits)
        difference = difference * student_factor + tl.sum(terms, axis=0)
    return student_largest, student_total, teacher_largest, teacher_total, difference, teacher_mean


@triton.jit
def sum_lanes(largest, sums, relative):
    """Returns the sum over lanes of sums that are relative to each lane's largest logit, now all relative to the same
    one.
    """
    return tl.sum(sums * tl.exp2(largest - relative), axis=0)


@triton.jit
def kl_statistics_kernel(
    student,
    teacher,
    token_mask,
    student_lse,
    teacher_lse,
    difference,
    teacher_mean,
    spec: tl.constexpr,
    per: tl.constexpr,
):
    """Computes the log-sum-exps of one token's tempered logits, the mean under the teacher of the teacher's logit, and
    the mean of the difference of both: forward under the teacher, of teacher minus student; reverse under the student,
    of student minus teacher; else 0. All are to base 2, [T] float32; 0 for tokens that do not count.
    """
    V: tl.constexpr = spec.V
    LANES: tl.constexpr = spec.LANES
    TILE: tl.constexpr = spec.STRIPS * spec.LANES
    WHOLE: tl.constexpr = V // TILE * TILE
    batch, token = locate_token(spec)
    active = load_token(token_mask, batch, token, per.TOKEN_MASK, spec) != 0
    student = token_row(student, batch, token, per.STUDENT, spec)
    teacher = token_row(teacher, batch, token, per.TEACHER, spec)
    largest_s = tl.full([LANES], float("-inf"), tl.float32)
    largest_t = tl.full([LANES], float("-inf"), tl.float32)
    total_s = tl.zeros([LANES], tl.float32)
    total_t = tl.zeros([LANES], tl.float32)
    sum_d = tl.zeros([LANES], tl.float32)
    sum_t = tl.zeros([LANES], tl.float32)
    for start in tl.range(0, tl.where(active, WHOLE, 0), TILE):
        largest_s, total_s, largest_t, total_t, sum_d, sum_t = add_tile(
            largest_s, total_s, largest_t, total_t, sum_d, sum_t, student, teacher, start, False, spec
        )
    # At most one tile, which ends past the last entry.
    for start in tl.range(WHOLE, tl.where(active, V, WHOLE), TILE):
        largest_s, total_s, largest_t, total_t, sum_d, sum_t = add_tile(
            largest_s, total_s, largest_t, total_t, sum_d, sum_t, student, teacher, start, True, spec
        )
    relative_s = minus_inf_to_zero(tl.max(largest_s, axis=0))
    relative_t = minus_inf_to_zero(tl.max(largest_t, axis=0))
    row_total_s = sum_lanes(largest_s, total_s, relative_s)
    row_total_t = sum_lanes(largest_t, total_t, relative_t)
    row_difference = tl.sum(sum_d, axis=0)  # 0 in a mixture
    if spec.DIRECTION == "forward":
        row_difference = sum_lanes(largest_t, sum_d, relative_t) / row_total_t
    if spec.DIRECTION == "reverse":
        row_difference = sum_lanes(largest_s, sum_d, relative_s) / row_total_s
    row_mean = sum_lanes(largest_t, sum_t, relative_t) / row_total_t
    store_token(student_lse, batch, token, tl.where(active, tl.log2(row_total_s) + relative_s, 0.0), spec)
    store_token(teacher_lse, batch, token, tl.where(active, tl.log2(row_total_t) + relative_t, 0.0), spec)
    store_token(difference, batch, token, tl.where(active, row_difference, 0.0), spec)
    store_token(teacher_mean, batch, token, tl.where(active, row_mean, 0.0), spec)
