"""The gradients of the losses in XLA."""

from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.families.cross_entropy import logit_gradient_factors
from ejkernel.planning.fixed_tiles import pad_axis
from ejkernel.types.pullback import Pullback
from ejkernel_xla.cross_entropy.config import LogitBlocks
from ejkernel_xla.cross_entropy.kernels import gradients
from ejkernel_xla.cross_entropy.kernels.blocks import AxisSpan, fill_token_blocks, loop_over_spans, select_tokens


def backward(pullback: Pullback, config: LogitBlocks) -> dict[str, jax.Array]:
    """Returns the gradients of inputs, head and bias.

    Args:
        pullback: Record, output, residuals, and the cotangents of the losses and, where they are not summed, of the
            log-sum-exps.
        config: Sizes of the blocks of logits, where they are made again.

    Returns:
        `{"inputs": [T, D], "lm_head": [D, V], "lm_head_bias": [V]}`, what is wanted of them, in the dtypes of the
        fields.
    """
    record, (loss_cotangent, lse_cotangent, *_) = pullback.record, pullback.cotangent
    saved = {name: getattr(pullback.residuals, name) for name in sorted(pullback.grad_fields)}
    if all(gradient is not None for gradient in saved.values()):
        return {name: (gradient * loss_cotangent).astype(gradient.dtype) for name, gradient in saved.items()}
    factors = logit_gradient_factors(
        record, pullback.output[1], loss_cotangent, jnp.zeros(()) if record.sum_over_tokens else lse_cotangent
    )
    scale = jnp.max(factors.scale, initial=jnp.finfo(factors.scale.dtype).tiny)

    def add(span: AxisSpan, sums: Any) -> Any:
        part_factors = factors.select_tokens(span.start, span.size)
        return gradients.add_tokens(sums, select_tokens(record, span), part_factors, span, scale, config.block_v)

    num_tokens, record = record.weights.shape[0], fill_token_blocks(record, config.block_t)
    missing = record.weights.shape[0] - num_tokens
    factors = type(factors)(*(pad_axis(x, 0, missing) for x in factors)) if missing else factors
    sums = loop_over_spans(
        record.weights.shape[0], config.block_t, add, gradients.zero_gradients(record, pullback.grad_fields)
    )
    return gradients.finish_gradients(sums, record, num_tokens, scale)
