"""Blocks of logits: some tokens by some entries of the vocabulary.

Blocks have one size, so that loops over them are one program. The last block of an axis starts early instead of being
short; what an earlier block has had of it is marked as not new, and counts nothing.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ejkernel.arithmetic import cdiv, is_symbolic
from ejkernel.families.cross_entropy import CrossEntropy, accumulator, smoothed_targets
from ejkernel.planning.fixed_tiles import pad_axis
from ejkernel.planning.precision import product_precision
from ejkernel_xla.cross_entropy.config import ALL_TOKENS


class AxisSpan(NamedTuple):
    """A block's part of an axis.

    Attributes:
        start: Its first index.
        size: How many.
        new: [size], whether no block before had the index.
    """

    start: Any
    size: int
    new: jax.Array


class VocabularyBlock(NamedTuple):
    """A block of logits.

    Attributes:
        values: [t, v], after the cap.
        targets: [t, v], the distribution to predict; 0 for entries that are not new.
        new: [v], whether no block before had the entry.
    """

    values: jax.Array
    targets: jax.Array
    new: jax.Array


def loop_over_spans(total: int, size: int, body: Callable[[AxisSpan, Any], Any], carry: Any) -> Any:
    """Calls `body(span, carry)` for each span of an axis and returns the last carry; a single span needs no loop."""
    # `fill_token_blocks` has left no short block of tokens.
    is_whole = size == ALL_TOKENS if is_symbolic(total) else size > total
    size = total if is_whole else size
    if not size:
        return carry

    def step(i: Any, carry: Any) -> Any:
        start = jnp.minimum(i * size, jnp.asarray(total - size))
        return body(AxisSpan(start, size, start + jnp.arange(size) >= i * size), carry)

    if size == total:
        return body(AxisSpan(0, size, jnp.ones(size, bool)), carry)
    return lax.fori_loop(0, cdiv(total, size), step, carry)


def fill_token_blocks(record: CrossEntropy, block_t: int) -> CrossEntropy:
    """Returns the record with tokens of weight 0 up to a whole block, if the count of its tokens is symbolic: there
    may be fewer than in a block.
    """
    tokens = record.weights.shape[0]
    if not is_symbolic(tokens) or block_t == ALL_TOKENS:
        return record
    missing = cdiv(tokens, block_t) * block_t - tokens
    arrays = {name: getattr(record, name) for name in ("inputs", "targets", "weights", "soft_targets")}
    return dataclasses.replace(record, **{name: pad_axis(x, 0, missing) for name, x in arrays.items() if x is not None})


def cut(array: jax.Array, span: AxisSpan, axis: int) -> jax.Array:
    """Returns a span of one axis."""
    return lax.dynamic_slice_in_dim(array, span.start, span.size, axis)


def replace_span(array: jax.Array, part: jax.Array, span: AxisSpan, axis: int) -> jax.Array:
    """Returns an array with a span of one axis replaced."""
    return lax.dynamic_update_slice_in_dim(array, part.astype(array.dtype), span.start, axis)


def select_tokens(record: CrossEntropy, span: AxisSpan) -> CrossEntropy:
    """Returns the record of some tokens; those of weight 0 have inputs 0, for they may hold NaN."""
    weights = cut(record.weights, span, 0)
    return dataclasses.replace(
        record,
        inputs=jnp.where((weights != 0)[:, None], cut(record.inputs, span, 0), 0),
        targets=cut(record.targets, span, 0),
        weights=weights,
        soft_targets=None if record.soft_targets is None else cut(record.soft_targets, span, 0),
    )


def vocabulary_block(record: CrossEntropy, span: AxisSpan) -> VocabularyBlock:
    """Returns the logits of a record of some tokens, for some entries of the vocabulary."""
    dtype = accumulator(record)
    if record.lm_head is None:
        values = cut(record.inputs, span, 1).astype(dtype)
    else:
        values = product(record.inputs, cut(record.lm_head, span, 1), ((1,), (0,)), dtype)
    if record.lm_head_bias is not None:
        values = values + cut(record.lm_head_bias, span, 0).astype(dtype)
    if (cap := record.logits_soft_cap) is not None:
        values = cap * jnp.tanh(values / cap)
    if record.soft_targets is not None:
        targets = cut(record.soft_targets, span, 1).astype(dtype)
    else:
        entry = span.start + jnp.arange(span.size, dtype=record.targets.dtype)
        targets = (entry == record.targets[:, None]).astype(dtype)
    counted = (record.weights != 0)[:, None] & span.new
    return VocabularyBlock(values, jnp.where(counted, smoothed_targets(record, targets), 0), span.new)


def product(left: jax.Array, right: jax.Array, contracted_axes: Any, dtype: Any) -> jax.Array:
    """Returns a matrix product, accumulated in and returned as `dtype`; the factors have the same dtype."""
    precision = product_precision(left.dtype)
    return lax.dot_general(left, right, (contracted_axes, ((), ())), precision, preferred_element_type=dtype)
