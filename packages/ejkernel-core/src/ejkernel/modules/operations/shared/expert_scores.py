"""Scores of experts: what `expert_routing` chooses by, and the weights of the chosen experts."""

from typing import Any

import jax
import jax.numpy as jnp

SCORE_FUNCTIONS = ("softmax", "sigmoid")

WEIGHT_SUM_EPSILON = 1e-20
"""Added to the sum of the weights before they are divided by it, as DeepSeek V3 does."""


def scores(args: Any) -> jax.Array:
    """Returns the score of every expert, [T, E] in at least float32.

    Args:
        args: The argument record of `expert_routing`, with scores.
    """
    logits = args.logits.astype(jnp.promote_types(args.logits.dtype, jnp.float32))
    return jax.nn.softmax(logits, axis=-1) if args.scores == "softmax" else jax.nn.sigmoid(logits)


def selection_scores(args: Any) -> jax.Array:
    """Returns what experts are chosen by, [T, E]: the logits, or biased scores that are -inf outside of the best
    groups.
    """
    if args.selection_bias is None and args.n_groups is None:
        return args.logits
    biased = scores(args)
    if args.selection_bias is not None:
        biased = biased + args.selection_bias.astype(biased.dtype)
    return biased if args.n_groups is None else _mask_other_groups(args, biased)


def _mask_other_groups(args: Any, biased_scores: jax.Array) -> jax.Array:
    """Returns the scores, -inf for experts of groups that are not among the best."""
    grouped = biased_scores.reshape(biased_scores.shape[0], args.n_groups, -1)
    of_group = jax.lax.top_k(grouped, args.group_score_experts)[0].sum(axis=-1)
    best = jax.lax.top_k(of_group, args.top_groups)[1]
    chosen = (best[:, :, None] == jnp.arange(args.n_groups)).any(axis=1)
    return jnp.where(chosen[:, :, None], grouped, -jnp.inf).reshape(biased_scores.shape)


def weights(args: Any, experts: jax.Array) -> jax.Array:
    """Returns the weights of the chosen experts [T, K], differentiable in the logits.

    Args:
        args: The argument record of `expert_routing`, with scores.
        experts: [T, K], the chosen experts.
    """
    chosen = jnp.take_along_axis(scores(args), experts, axis=1)
    if args.normalise:
        chosen = chosen / (chosen.sum(axis=-1, keepdims=True) + WEIGHT_SUM_EPSILON)
    return chosen * args.scale
