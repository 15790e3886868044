"""Device helpers of the divergence kernels: loads of logits, and the terms of a divergence.

A program has one token, and loops over its entries in the tiles of `cross_entropy.kernels.tile`.
"""

import triton
import triton.language as tl

from ejkernel_triton.cross_entropy.kernels.tile import entries_of_tile, load_entries


@triton.jit
def load_logit_pair(student, teacher, start, IS_MASKED: tl.constexpr, spec: tl.constexpr):
    """Returns the entries from `start` on, and the tempered logits of student and teacher to base 2; -inf past the last
    entry, if IS_MASKED.
    """
    entries = entries_of_tile(start, spec)
    student_logits = load_entries(student, entries, IS_MASKED, float("-inf"), spec) * spec.LOGIT_FACTOR
    return entries, student_logits, load_entries(teacher, entries, IS_MASKED, float("-inf"), spec) * spec.LOGIT_FACTOR


@triton.jit
def positive_or_zero(probabilities, x):
    """Returns x where a probability is positive, else 0."""
    return tl.where(probabilities > 0.0, x, 0.0)


@triton.jit
def log_mixture(student_probabilities, teacher_probabilities, spec: tl.constexpr):
    """Returns the logarithm to base 2 of the mixture of student and teacher."""
    return tl.log2(spec.BETA * teacher_probabilities + (1.0 - spec.BETA) * student_probabilities)
