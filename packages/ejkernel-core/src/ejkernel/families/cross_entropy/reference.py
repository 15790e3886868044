"""Defines the cross-entropy of token logits, in plain jnp.

With logits z_t = h_t W + b, or given as they are, and z = cap tanh(z / cap) with a soft cap:

    lse_t  = log sum over v of exp(z_tv)
    q_t    = (1 - s) p_t + s / V                 p_t the soft target, or 1 at the target and 0 elsewhere
    loss_t = w_t (lse_t sum_v q_tv - sum_v q_tv z_tv + zeta lse_t^2)

w are the weights, s is the label smoothing and zeta the factor of the z-loss. Logits and sums are float32 (float64 for
float64 inputs). A token of weight 0 has loss 0 and passes no gradient on, whatever it holds. The gradient with respect
to the logits, before the cap, is

    dz_tv = (softmax(z_t)_v (w_t (sum q + 2 zeta lse_t) dl_t + dlse_t) - w_t q_tv dl_t) (1 - (z_tv / cap)^2)

with dl_t and dlse_t the cotangents of the loss and of the log-sum-exp.

Source: z-loss of Chowdhery et al. 2022, arXiv:2204.02311 (PaLM), section 5; label smoothing of Szegedy et al. 2015,
arXiv:1512.00567; chunks of logits with their gradients made in the forward pass, Hsu et al. 2024, arXiv:2410.10989
(Liger).
"""

import jax
import jax.numpy as jnp
from jax import lax

from ejkernel.families.cross_entropy.record import CrossEntropy, CrossEntropyResiduals, accumulator, smoothed_targets


def reference(record: CrossEntropy) -> tuple[tuple[jax.Array, jax.Array, jax.Array, jax.Array], CrossEntropyResiduals]:
    """Computes the result of the family in plain jnp, with all logits at once; in float64 if `inputs` is float64, else
    in float32.

    Returns:
        Four arrays in the dtype of sums: the losses [T], or their sum [1] where the record asks for it; log-sum-exp
        [T], which has a gradient where the losses are not summed; without gradients the largest logit [T] and the first
        entry that has it [T]. The last three are 0 for tokens of weight 0. The residuals
        are empty.
    """
    dtype = accumulator(record)
    active = record.weights != 0
    weights = record.weights.astype(dtype)
    logits = jnp.where(active[:, None], record.inputs, 0).astype(dtype)
    if record.lm_head is not None:
        logits = jnp.dot(logits, record.lm_head.astype(dtype), precision=lax.Precision.HIGHEST)
    if record.lm_head_bias is not None:
        logits = logits + record.lm_head_bias.astype(dtype)
    if record.logits_soft_cap is not None:
        logits = record.logits_soft_cap * jnp.tanh(logits / record.logits_soft_cap)
    hard = jax.nn.one_hot(record.targets, logits.shape[1], dtype=dtype)
    q = smoothed_targets(record, hard if record.soft_targets is None else record.soft_targets.astype(dtype))
    q = jnp.where(active[:, None], q, 0)
    lse = jnp.where(active, jax.nn.logsumexp(logits, axis=1), 0)
    expected = jnp.sum(jnp.where(q != 0, q * logits, 0), axis=1)
    loss = weights * (lse * jnp.sum(q, axis=1) - expected + record.z_loss * lse**2)
    if record.sum_over_tokens:
        loss, lse = jnp.sum(loss, keepdims=True), lax.stop_gradient(lse)
    largest, entry = (jnp.where(active, f(logits, axis=1), 0).astype(dtype) for f in (jnp.max, jnp.argmax))
    return (loss, lse, lax.stop_gradient(largest), lax.stop_gradient(entry)), CrossEntropyResiduals()
