"""Defines the argument record of the cross-entropy of token logits, and functions of the record alone."""

from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.types.arguments import arguments, static


@arguments
class CrossEntropy:
    """Canonical input of one cross-entropy. T tokens, V entries of the vocabulary, D channels.

    Attributes:
        inputs: [T, V] floating logits; with `lm_head`, [T, D] hidden states, from which the logits are made.
        targets: [T] int32, the entry that each token is to predict; outside of 0..V-1 for none. Not read with
            `soft_targets`.
        weights: [T] float32, a factor of every token's loss. Tokens of weight 0 may hold anything.
        lm_head: [D, V], the dtype of inputs.
        lm_head_bias: [V] floating, added to the logits.
        soft_targets: [T, V] floating, the distribution that each token is to predict.
        logits_soft_cap: The logits x become `cap * tanh(x / cap)`.
        label_smoothing: The part of a target that is spread evenly over the vocabulary.
        z_loss: Factor of the squared log-sum-exp in every token's loss.
        sum_over_tokens: Whether the loss is one number, the sum over tokens (over a device's tokens, where they are
            split).
    """

    inputs: jax.Array
    targets: jax.Array
    weights: jax.Array
    lm_head: jax.Array | None = None
    lm_head_bias: jax.Array | None = None
    soft_targets: jax.Array | None = None
    logits_soft_cap: float | None = static(None)
    label_smoothing: float = static(0.0)
    z_loss: float = static(0.0)
    sum_over_tokens: bool = static(False)


@arguments
class CrossEntropyResiduals:
    """The gradients of a summed loss for a cotangent of 1, in the dtypes of the fields.

    A forward pass may compute these gradients. Otherwise the backward pass computes them, and recomputes the logits for
    that.

    Attributes:
        inputs: [T, D].
        lm_head: [D, V].
        lm_head_bias: [V].
    """

    inputs: jax.Array | None = None
    lm_head: jax.Array | None = None
    lm_head_bias: jax.Array | None = None


def accumulator(record: CrossEntropy) -> Any:
    """Returns the dtype of logits, sums and losses: float32, or float64 for float64 inputs."""
    return jnp.promote_types(record.inputs.dtype, jnp.float32)


def vocabulary(record: CrossEntropy) -> int:
    """Returns V."""
    return record.inputs.shape[1] if record.lm_head is None else record.lm_head.shape[1]


def target_probability_sums(record: CrossEntropy) -> jax.Array:
    """Returns the sum of each token's distribution to predict, [T]."""
    part = record.label_smoothing
    if record.soft_targets is not None:
        sums = jnp.sum(record.soft_targets.astype(accumulator(record)), axis=1)
    else:
        sums = ((record.targets >= 0) & (record.targets < vocabulary(record))).astype(accumulator(record))
    return (1 - part) * sums + part


def smoothed_targets(record: CrossEntropy, targets: jax.Array) -> jax.Array:
    """Returns the distribution that tokens are to predict, from that without smoothing."""
    part = record.label_smoothing
    return (1 - part) * targets + part / vocabulary(record) if part else targets
