"""Gradients of some tokens' losses with respect to the logits, and of what the logits are made of."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ejkernel.families.cross_entropy import CrossEntropy, LogitGradientFactors, accumulator, vocabulary
from ejkernel_xla.cross_entropy.kernels.blocks import (
    AxisSpan,
    VocabularyBlock,
    cut,
    loop_over_spans,
    product,
    replace_span,
    vocabulary_block,
)


class GradientSums(NamedTuple):
    """Gradients so far.

    Attributes:
        inputs: [T, D], or [T, V] of logits, in the dtype of inputs; None where it is not asked for.
        lm_head: [D, V] in the dtype of sums; None where it is not asked for.
        lm_head_bias: [V], in the dtype of sums; None where it is not asked for.
    """

    inputs: jax.Array | None
    lm_head: jax.Array | None
    lm_head_bias: jax.Array | None


def zero_gradients(record: CrossEntropy, grad_fields: frozenset[str]) -> GradientSums:
    """Returns gradients of nothing, of the fields that are asked for."""
    dtypes = {"inputs": record.inputs.dtype, "lm_head": accumulator(record), "lm_head_bias": accumulator(record)}
    return GradientSums(
        **{
            name: jnp.zeros(getattr(record, name).shape, dtype)
            if name in grad_fields and getattr(record, name) is not None
            else None
            for name, dtype in dtypes.items()
        }
    )


def add_tokens(
    sums: GradientSums,
    record: CrossEntropy,
    factors: LogitGradientFactors,
    span: AxisSpan,
    scale: jax.Array,
    block_v: int,
) -> GradientSums:
    """Returns gradients with those of some tokens.

    Args:
        sums: The gradients so far; sums over tokens are divided by `scale`.
        record: The record of the tokens.
        factors: Their factors.
        span: Which they are. Those that are not new have had their part of the sums.
        scale: A number about as large as the largest scale of all tokens.
        block_v: Entries of the vocabulary in a block.
    """
    dtype = accumulator(record)
    share = factors.scale / scale
    rows = jnp.zeros(record.inputs.shape, dtype) if sums.inputs is not None else None

    def add(entries: AxisSpan, carry: tuple[GradientSums, jax.Array | None]) -> tuple[GradientSums, jax.Array | None]:
        sums, rows = carry
        gradient = logit_gradient(record, vocabulary_block(record, entries), factors)
        if record.lm_head is None:
            # The last block begins early: the gradient of an entry that an earlier block had is 0 here, and stays.
            rows = None if rows is None else replace_span(rows, cut(rows, entries, 1) + gradient, entries, 1)
        elif rows is not None:
            narrow = gradient.astype(record.inputs.dtype)
            rows = rows + product(narrow, cut(record.lm_head, entries, 1), ((1,), (1,)), dtype)
        counted = jnp.where(span.new[:, None], gradient * share[:, None], 0)
        return add_block(sums, record, counted, entries), rows

    sums, rows = loop_over_spans(vocabulary(record), block_v, add, (sums, rows))
    if sums.inputs is None or rows is None:
        return sums
    return sums._replace(inputs=replace_span(sums.inputs, rows * factors.scale[:, None], span, 0))


def logit_gradient(record: CrossEntropy, block: VocabularyBlock, factors: LogitGradientFactors) -> jax.Array:
    """Returns the gradient of a block of logits before their cap, [t, v]; 0 for entries that are not new."""
    lse, softmax_factor, target_factor, _ = (x[:, None] for x in factors)
    counted = (record.weights != 0)[:, None] & block.new
    # If all logits are -inf, the log-sum-exp is -inf and no softmax is defined. The gradient is then NaN, as the loss
    # is.
    gradient = jnp.exp(block.values - lse) * softmax_factor - block.targets * target_factor
    if record.logits_soft_cap is not None:
        gradient = gradient * (1 - (block.values / record.logits_soft_cap) ** 2)
    return jnp.where(counted, gradient, 0)


def add_block(sums: GradientSums, record: CrossEntropy, gradient: jax.Array, entries: AxisSpan) -> GradientSums:
    """Returns sums over tokens with those of a block of logits' gradients."""
    if sums.lm_head is not None:
        narrow = gradient.astype(record.inputs.dtype)
        part = product(record.inputs, narrow, ((0,), (0,)), sums.lm_head.dtype)
        sums = sums._replace(lm_head=replace_span(sums.lm_head, cut(sums.lm_head, entries, 1) + part, entries, 1))
    if sums.lm_head_bias is not None:
        part = jnp.sum(gradient, axis=0)
        sums = sums._replace(
            lm_head_bias=replace_span(sums.lm_head_bias, cut(sums.lm_head_bias, entries, 0) + part, entries, 0)
        )
    return sums


def finish_gradients(sums: GradientSums, record: CrossEntropy, tokens: Any, factor: jax.Array) -> dict[str, jax.Array]:
    """Returns the gradients by field, in the fields' dtypes, those of inputs without what fills up their last block;
    sums over tokens are multiplied by a factor.
    """
    found = {"inputs": sums.inputs[:tokens]} if sums.inputs is not None else {}
    for name in ("lm_head", "lm_head_bias"):
        if (total := getattr(sums, name)) is not None:
            found[name] = (total * factor).astype(getattr(record, name).dtype)
    return found
