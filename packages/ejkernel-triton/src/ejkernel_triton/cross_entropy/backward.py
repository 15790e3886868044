"""Backward pass of the cross-entropy in Triton."""

import jax
import jax.numpy as jnp

from ejkernel.families.cross_entropy import CrossEntropy, LogitGradientFactors, logit_gradient_factors
from ejkernel.types.pullback import Pullback
from ejkernel_triton.cross_entropy import plan
from ejkernel_triton.cross_entropy.config import LossTiles
from ejkernel_triton.cross_entropy.forward import entry_arrays, token_arrays
from ejkernel_triton.cross_entropy.spec import make_spec
from ejkernel_triton.launch import ShapeDtype, launch


def backward(pullback: Pullback, config: LossTiles) -> dict[str, jax.Array]:
    """Returns the gradients of inputs, head and bias.

    Args:
        pullback: Record, output, residuals, and the cotangents of the losses and, if they are not summed, of the
            log-sum-exps.
        config: Blocks, tiles and warps.

    Returns:
        `{"inputs": [T, D] or [T, V], "lm_head": [D, V], "lm_head_bias": [V]}`, those that are requested, in the dtypes
        of the fields.
    """
    record, (loss_cotangent, lse_cotangent, *_) = pullback.record, pullback.cotangent
    saved = {name: getattr(pullback.residuals, name) for name in sorted(pullback.grad_fields)}
    if all(gradient is not None for gradient in saved.values()):
        return {name: (gradient * loss_cotangent).astype(gradient.dtype) for name, gradient in saved.items()}
    factors = logit_gradient_factors(
        record, pullback.output[1], loss_cotangent, 0.0 if record.sum_over_tokens else lse_cotangent
    )
    if record.lm_head is None:
        one = jnp.ones_like(factors.scale)
        whole = LogitGradientFactors(
            factors.lse, factors.softmax_factor * factors.scale, factors.target_factor * factors.scale, one
        )
        return {"inputs": _logit_gradient(record, record.inputs, whole, config)}
    scale = jnp.max(factors.scale, initial=jnp.finfo(jnp.float32).tiny)

    def add(block: plan.TokenBlock, sums: plan.GradientSums) -> plan.GradientSums:
        part, part_factors = plan.select_tokens(record, block), factors.select_tokens(block.start, block.size)
        gradient = _logit_gradient(part, plan.block_logits(part, config), part_factors, config)
        return plan.add_block(sums, part, gradient, part_factors.scale, block, scale)

    start = plan.zero_gradients(record, pullback.grad_fields, config)
    sums = plan.loop_over_blocks(record.weights.shape[0], config.block_t, add, start)
    return plan.finish_gradients(sums, record, scale)


def _logit_gradient(
    record: CrossEntropy, logits: jax.Array, factors: LogitGradientFactors, config: LossTiles
) -> jax.Array:
    """Returns the gradient of logits [T, V] in the dtype of inputs, each token's divided by its scale; in the memory of
    the logits, if they have the same dtype.
    """
    from ejkernel_triton.cross_entropy.kernels.cross_entropy_bwd import cross_entropy_bwd_kernel

    in_place = logits.dtype == record.inputs.dtype
    (gradient,) = launch(
        cross_entropy_bwd_kernel,
        (
            *token_arrays(record),
            logits[None],
            *entry_arrays(record),
            factors.lse[None],
            factors.softmax_factor[None],
            factors.target_factor[None],
        ),
        (2 if in_place else ShapeDtype((1, *logits.shape), record.inputs.dtype),),
        batch=1,
        grid=record.weights.shape[0],
        num_warps=config.num_warps,
        num_stages=1,
        constants={"spec": make_spec(record, logits.dtype, config, in_place=in_place)},
    )
    return gradient[0]
