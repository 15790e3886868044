"""Blocks of tokens whose logits exist together, and the products around the kernels.

    hidden states of a block  x  matrix           ->  logits             a product of XLA's
    logits                                        ->  their gradient     a kernel, in the same memory
    gradient  x  matrix^T                         ->  gradient of the hidden states
    hidden states^T  x  gradient, added           ->  gradient of the matrix

Blocks have one size, so that the loop over them is one program. The last block starts early instead of being short; its
tokens that an earlier block had add nothing to sums over tokens.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ejkernel.arithmetic import cdiv
from ejkernel.families.cross_entropy import CrossEntropy
from ejkernel.planning.precision import product_precision
from ejkernel_triton.cross_entropy.config import LossTiles


class TokenBlock(NamedTuple):
    """The tokens of a block.

    Attributes:
        start: The first.
        size: How many.
        new: [size], whether no block before had the token.
    """

    start: Any
    size: int
    new: jax.Array

    def cut(self, array: jax.Array) -> jax.Array:
        """Returns the block's part of an array whose first axis is tokens."""
        return lax.dynamic_slice_in_dim(array, self.start, self.size)

    def replace(self, array: jax.Array, part: jax.Array) -> jax.Array:
        """Returns an array with the block's part replaced."""
        return lax.dynamic_update_slice_in_dim(array, part.astype(array.dtype), self.start, 0)


def loop_over_blocks(tokens: int, size: int, body: Callable[[TokenBlock, Any], Any], carry: Any) -> Any:
    """Calls `body(block, carry)` for each block of tokens and returns the last carry."""
    size = min(size, tokens)

    def step(i: Any, carry: Any) -> Any:
        start = jnp.minimum(i * size, tokens - size)
        return body(TokenBlock(start, size, start + jnp.arange(size) >= i * size), carry)

    if size == tokens:
        return body(TokenBlock(0, size, jnp.ones(size, bool)), carry)
    return lax.fori_loop(0, cdiv(tokens, size), step, carry)


def select_tokens(record: CrossEntropy, block: TokenBlock) -> CrossEntropy:
    """Returns the record of a block's tokens; those of weight 0 have hidden states 0, for they may hold NaN."""
    weights = block.cut(record.weights)
    return dataclasses.replace(
        record,
        inputs=jnp.where((weights != 0)[:, None], block.cut(record.inputs), 0),
        targets=block.cut(record.targets),
        weights=weights,
        soft_targets=None if record.soft_targets is None else block.cut(record.soft_targets),
    )


def product(left: jax.Array, right: jax.Array, contracted_axes: Any, dtype: Any) -> jax.Array:
    """Returns a product of matrices of one dtype, which is accumulated in float32 and returned as `dtype`."""
    precision = product_precision(left.dtype)
    return lax.dot_general(left, right, (contracted_axes, ((), ())), precision, preferred_element_type=dtype)


def block_logits(record: CrossEntropy, config: LossTiles) -> jax.Array:
    """Returns the logits of a block's record, without bias and cap."""
    assert record.lm_head is not None  # the logits are not given
    dtype = jnp.float32 if config.float32_logits else record.inputs.dtype
    return product(record.inputs, record.lm_head, ((1,), (0,)), dtype)


class GradientSums(NamedTuple):
    """Gradients so far; those that are not asked for are None.

    Attributes:
        inputs: [T, D] in the dtype of inputs.
        lm_head: [D, V], divided by a scale that all tokens share.
        lm_head_bias: [V] float32, divided by the same scale.
    """

    inputs: jax.Array | None
    lm_head: jax.Array | None
    lm_head_bias: jax.Array | None


def zero_gradients(record: CrossEntropy, grad_fields: frozenset[str], config: LossTiles) -> GradientSums:
    """Returns gradients of nothing, of the fields that are asked for."""
    sum_dtype = jnp.float32 if config.float32_sums else record.inputs.dtype
    dtypes = {"inputs": record.inputs.dtype, "lm_head": sum_dtype, "lm_head_bias": jnp.float32}
    arrays = {name: getattr(record, name) if name in grad_fields else None for name in dtypes}
    return GradientSums(**{name: x if x is None else jnp.zeros(x.shape, dtypes[name]) for name, x in arrays.items()})


def add_block(
    sums: GradientSums,
    record: CrossEntropy,
    logit_gradient: jax.Array,
    token_scale: jax.Array,
    block: TokenBlock,
    scale: jax.Array,
) -> GradientSums:
    """Returns gradients with those of a block.

    Args:
        sums: The gradients so far.
        record: The record of the block's tokens.
        logit_gradient: [t, V], each token's divided by its scale.
        token_scale: [t], powers of 2.
        block: Which tokens they are.
        scale: What sums over tokens are divided by.
    """
    share = jnp.where(block.new, token_scale / scale, 0)
    if sums.inputs is not None and record.lm_head is not None:
        rows = product(logit_gradient, record.lm_head, ((1,), (1,)), jnp.float32)
        sums = sums._replace(inputs=block.replace(sums.inputs, rows * token_scale[:, None]))
    if sums.lm_head is not None:
        # A power of 2 rounds nothing.
        shares = (record.inputs.astype(jnp.float32) * share[:, None]).astype(record.inputs.dtype)
        part = product(shares, logit_gradient, ((0,), (0,)), sums.lm_head.dtype)
        sums = sums._replace(lm_head=sums.lm_head + part)
    if sums.lm_head_bias is not None:
        part = jnp.sum(logit_gradient.astype(jnp.float32) * share[:, None], axis=0)
        sums = sums._replace(lm_head_bias=sums.lm_head_bias + part)
    return sums


def finish_gradients(sums: GradientSums, record: CrossEntropy, scale: jax.Array) -> dict[str, jax.Array]:
    """Returns the gradients by field, in the fields' dtypes; sums over tokens are multiplied by the scale."""
    found = {} if sums.inputs is None else {"inputs": sums.inputs}
    for name in ("lm_head", "lm_head_bias"):
        if (total := getattr(sums, name)) is not None:
            found[name] = (total * scale).astype(getattr(record, name).dtype)
    return found
