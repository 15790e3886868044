"""The statistics of logits that the losses of tokens need, gathered block by block of the vocabulary."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from ejkernel.families.cross_entropy import CrossEntropy, accumulator, vocabulary
from ejkernel_xla.cross_entropy.kernels.blocks import AxisSpan, VocabularyBlock, loop_over_spans, vocabulary_block


class TokenStatistics(NamedTuple):
    """Numbers of each token, [t].

    Attributes:
        largest: The largest logit so far.
        entry: The first entry that has it.
        total: Sum of `exp(logit - largest)`.
        target_logit_sum: Sum of the targets times the logits.
        target_sum: Sum of the targets.
    """

    largest: jax.Array
    entry: jax.Array
    total: jax.Array
    target_logit_sum: jax.Array
    target_sum: jax.Array

    def lse(self) -> jax.Array:
        """Returns the log-sum-exp; -inf where all logits are."""
        return jnp.log(self.total) + exponential_offset(self.largest)


def exponential_offset(largest: jax.Array) -> jax.Array:
    """Returns what exponentials are taken relative to: 0 where all logits are -inf."""
    return jnp.where(jnp.isneginf(largest), 0, largest)


def statistics_of_tokens(record: CrossEntropy, block_v: int) -> TokenStatistics:
    """Returns the statistics of a record of some tokens."""
    tokens, dtype = record.weights.shape[0], accumulator(record)
    zeros = jnp.zeros(tokens, dtype)
    start = TokenStatistics(jnp.full(tokens, -jnp.inf, dtype), jnp.full(tokens, -1, jnp.int32), zeros, zeros, zeros)

    def add(span: AxisSpan, statistics: TokenStatistics) -> TokenStatistics:
        return add_block(statistics, record, vocabulary_block(record, span), span)

    return loop_over_spans(vocabulary(record), block_v, add, start)


def add_block(
    statistics: TokenStatistics, record: CrossEntropy, block: VocabularyBlock, span: AxisSpan
) -> TokenStatistics:
    """Returns statistics with those of a block of logits."""
    values = jnp.where(block.new, block.values, -jnp.inf)
    entry = jnp.argmax(values, axis=1)
    best = jnp.max(values, axis=1)
    largest = jnp.maximum(statistics.largest, best)
    relative = exponential_offset(largest)
    target_logit_sum, target_sum = target_sums(record, block, span)
    return TokenStatistics(
        largest=largest,
        entry=jnp.where(best > statistics.largest, span.start + entry, statistics.entry).astype(jnp.int32),
        total=statistics.total * jnp.exp(statistics.largest - relative)
        + jnp.sum(jnp.exp(values - relative[:, None]), axis=1),
        target_logit_sum=statistics.target_logit_sum + target_logit_sum,
        target_sum=statistics.target_sum + target_sum,
    )


def target_sums(record: CrossEntropy, block: VocabularyBlock, span: AxisSpan) -> tuple[jax.Array, jax.Array]:
    """Returns the sums of targets times logits and of targets over a block, [t] each.

    Where a target is 0, a logit of -inf counts nothing.
    """
    if record.soft_targets is not None or record.label_smoothing:
        products = jnp.where(block.targets != 0, block.targets * block.values, 0)
        return jnp.sum(products, axis=1), jnp.sum(block.targets, axis=1)
    # One entry of a token counts: loading it saves a pass over all logits.
    at = jnp.clip(record.targets - span.start, 0, span.size - 1)
    is_target = (record.weights != 0) & (record.targets - span.start == at) & block.new[at]
    value = jnp.take_along_axis(block.values, at[:, None], axis=1)[:, 0]
    return jnp.where(is_target, value, 0), is_target.astype(block.values.dtype)


def losses(record: CrossEntropy, statistics: TokenStatistics) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Returns the losses, the log-sum-exps, the largest logits and their entries, [t] each, of some tokens."""
    active, dtype = record.weights != 0, accumulator(record)
    lse = jnp.where(active, statistics.lse(), 0)
    loss = lse * statistics.target_sum - statistics.target_logit_sum + record.z_loss * lse**2
    largest, entry = (jnp.where(active, x, 0).astype(dtype) for x in (statistics.largest, statistics.entry))
    return jnp.where(active, record.weights.astype(dtype) * loss, 0), lse, largest, entry
