"""The losses in XLA."""

import dataclasses
from typing import Any

import jax.numpy as jnp

from ejkernel.families.cross_entropy import (
    FAMILY,
    CrossEntropy,
    CrossEntropyResiduals,
    accumulator,
    logit_gradient_factors,
    power_of_two,
    vocabulary,
)
from ejkernel.types.pullback import is_differentiated
from ejkernel_xla.cross_entropy.config import LogitBlocks
from ejkernel_xla.cross_entropy.kernels import gradients, statistics
from ejkernel_xla.cross_entropy.kernels.blocks import (
    AxisSpan,
    fill_token_blocks,
    loop_over_spans,
    replace_span,
    select_tokens,
)
from ejkernel_xla.fixed_tiles import forward_in_tiles


def forward(record: CrossEntropy, config: LogitBlocks) -> tuple[Any, CrossEntropyResiduals]:
    """Returns the losses of a record.

    Args:
        record: The canonical arguments.
        config: Sizes of the blocks of logits.

    Returns:
        The family's output; and the gradients, where a backward pass follows and its cotangent is one number. They cost
        no more logits here, and would have them made again there.
    """
    if config.batch_invariant:
        blocks = dataclasses.replace(config, batch_invariant=False)
        axes = FAMILY.axes_of(record)
        return forward_in_tiles(lambda tile: forward(tile, blocks), record, axes, "t", block=config.block_t)
    num_tokens, dtype = record.weights.shape[0], accumulator(record)
    record = fill_token_blocks(record, config.block_t)
    tokens = record.weights.shape[0]
    saves_gradients = (
        record.sum_over_tokens
        and record.lm_head is not None
        and config.block_v >= vocabulary(record)
        and is_differentiated()
    )
    grad_fields = frozenset(FAMILY.differentiable) if saves_gradients else frozenset[str]()
    scale = power_of_two(jnp.max(jnp.abs(record.weights.astype(dtype)), initial=0))

    def add(span: AxisSpan, carry: Any) -> Any:
        outputs, sums = carry
        part = select_tokens(record, span)
        results = statistics.losses(part, statistics.statistics_of_tokens(part, config.block_v))
        if saves_gradients:
            factors = logit_gradient_factors(part, results[1], 1.0, 0.0)
            sums = gradients.add_tokens(sums, part, factors, span, scale, config.block_v)
        return tuple(replace_span(whole, x, span, 0) for whole, x in zip(outputs, results, strict=True)), sums

    start = (tuple(jnp.zeros(tokens, dtype) for _ in range(4)), gradients.zero_gradients(record, grad_fields))
    (loss, *rest), sums = loop_over_spans(tokens, config.block_t, add, start)
    loss = jnp.sum(loss, keepdims=True) if record.sum_over_tokens else loss[:num_tokens]
    residuals = gradients.finish_gradients(sums, record, num_tokens, scale) if saves_gradients else {}
    return (loss, *(x[:num_tokens] for x in rest)), CrossEntropyResiduals(**residuals)
