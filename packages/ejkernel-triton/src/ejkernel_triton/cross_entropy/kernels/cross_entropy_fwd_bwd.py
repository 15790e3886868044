"""Computes the losses of tokens, and the gradient of their logits for a cotangent that is known.

product of a block's tokens  ->  logits  ->  HBM, L2
one program per token             |  read: log-sum-exp, target, loss
                                  |  read again, mostly from L2: gradient, in the memory of the logits
products of the gradient     <-  gradient
"""

import triton
import triton.language as tl

from ejkernel_triton.cross_entropy.kernels.tile import (
    load_token,
    locate_token,
    store_gradient,
    store_statistics,
    token_row,
    token_statistics,
)


@triton.jit
def cross_entropy_fwd_bwd_kernel(
    targets,
    weights,
    gradient_weights,
    logits,
    soft_targets,
    bias,
    gradient,
    loss,
    lse,
    largest_logits,
    largest_entries,
    spec: tl.constexpr,
    per: tl.constexpr,
):
    """Computes the outputs of `cross_entropy_fwd_kernel` of one token, and the gradient of its logits, [V], where the
    loss has the weight `gradient_weights`. If IN_PLACE, `gradient` has the logits and aliases them.
    """
    if spec.IN_PLACE:
        logits = gradient
    batch, token = locate_token(spec)
    weight = load_token(weights, batch, token, per.WEIGHTS, spec)
    gradient_weight = load_token(gradient_weights, batch, token, per.GRADIENT_WEIGHTS, spec)
    target = load_token(targets, batch, token, per.TARGETS, spec)
    logits = token_row(logits, batch, token, per.LOGITS, spec)
    if spec.HAS_SOFT_TARGETS:
        soft_targets = token_row(soft_targets, batch, token, per.SOFT_TARGETS, spec)
    if spec.HAS_BIAS:
        bias += (batch // per.BIAS) * spec.V
    rows = (logits, bias, soft_targets)
    statistics = token_statistics(rows, target, weight != 0.0, spec)
    store_statistics((loss, lse, largest_logits, largest_entries), batch, token, statistics, weight, spec)
    row_lse, _, _, _, mass = statistics
    factors = (row_lse, gradient_weight * (mass + 2.0 * spec.Z_LOSS * row_lse), gradient_weight)
    # Every thread has read what it needs of the row before another overwrites it.
    tl.debug_barrier()
    gradient = token_row(gradient, batch, token, per.GRADIENT, spec)
    store_gradient(gradient, rows, target, weight != 0.0, factors, spec)
