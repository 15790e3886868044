"""Computes the losses of tokens, with one read of their logits."""

import triton
import triton.language as tl

from ejkernel_triton.cross_entropy.kernels.tile import (
    load_token,
    locate_token,
    store_statistics,
    token_row,
    token_statistics,
)


@triton.jit
def cross_entropy_fwd_kernel(
    targets,
    weights,
    logits,
    soft_targets,
    bias,
    loss,
    lse,
    largest_logits,
    largest_entries,
    spec: tl.constexpr,
    per: tl.constexpr,
):
    """Computes loss, log-sum-exp, largest logit and its first entry of one token, [T] float32 each."""
    batch, token = locate_token(spec)
    weight = load_token(weights, batch, token, per.WEIGHTS, spec)
    target = load_token(targets, batch, token, per.TARGETS, spec)
    logits = token_row(logits, batch, token, per.LOGITS, spec)
    if spec.HAS_SOFT_TARGETS:
        soft_targets = token_row(soft_targets, batch, token, per.SOFT_TARGETS, spec)
    if spec.HAS_BIAS:
        bias += (batch // per.BIAS) * spec.V
    statistics = token_statistics((logits, bias, soft_targets), target, weight != 0.0, spec)
    store_statistics((loss, lse, largest_logits, largest_entries), batch, token, statistics, weight, spec)
