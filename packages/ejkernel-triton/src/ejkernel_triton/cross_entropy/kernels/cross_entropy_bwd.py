"""Computes the gradient of logits whose log-sum-exps are known, with one read and one write."""

import triton
import triton.language as tl

from ejkernel_triton.cross_entropy.kernels.tile import load_token, locate_token, store_gradient, token_row


@triton.jit
def cross_entropy_bwd_kernel(
    targets,
    weights,
    logits,
    soft_targets,
    bias,
    lse,
    softmax_factors,
    target_factors,
    gradient,
    spec: tl.constexpr,
    per: tl.constexpr,
):
    """Computes the gradient of one token's logits, [V]: `softmax * softmax_factor - targets * target_factor`, times the
    derivative of the cap. If IN_PLACE, `gradient` has the logits and aliases them.
    """
    if spec.IN_PLACE:
        logits = gradient
    batch, token = locate_token(spec)
    active = load_token(weights, batch, token, per.WEIGHTS, spec) != 0.0
    target = load_token(targets, batch, token, per.TARGETS, spec)
    logits = token_row(logits, batch, token, per.LOGITS, spec)
    if spec.HAS_SOFT_TARGETS:
        soft_targets = token_row(soft_targets, batch, token, per.SOFT_TARGETS, spec)
    if spec.HAS_BIAS:
        bias += (batch // per.BIAS) * spec.V
    factors = (
        load_token(lse, batch, token, per.LSE, spec),
        load_token(softmax_factors, batch, token, per.SOFTMAX_FACTORS, spec),
        load_token(target_factors, batch, token, per.TARGET_FACTORS, spec),
    )
    gradient = token_row(gradient, batch, token, per.GRADIENT, spec)
    store_gradient(gradient, (logits, bias, soft_targets), target, active, factors, spec)
