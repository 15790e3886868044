"""Scores of experts: what `expert_routing` chooses by, and the weights of the chosen experts."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.ops.invariant_rows import compute_rows

SCORE_FUNCTIONS = ("softmax", "sigmoid")

WEIGHT_SUM_EPSILON = 1e-20
"""Added to the sum of the weights before they are divided by it, as DeepSeek V3 does."""


def scores(args: Any) -> jax.Array:
    """Returns the score of every expert, [T, E] in at least float32.

    Args:
        args: The argument record of `expert_routing`, with scores.
    """
    return compute_rows(functools.partial(_scores, args.scores), (args.logits,))


def _scores(name: str, logits: jax.Array) -> jax.Array:
    logits = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
    return jax.nn.softmax(logits, axis=-1) if name == "softmax" else jax.nn.sigmoid(logits)


def selection_scores(args: Any) -> jax.Array:
    """Returns what experts are chosen by, [T, E]: the logits, or biased scores that are -inf outside of the best
    groups.
    """
    if args.selection_bias is None and args.n_groups is None:
        return args.logits
    function = _SelectionScores(
        scores=args.scores,
        n_groups=args.n_groups,
        top_groups=args.top_groups,
        group_score_experts=args.group_score_experts,
    )
    return compute_rows(function, (args.logits,), () if args.selection_bias is None else (args.selection_bias,))


@dataclasses.dataclass(frozen=True, kw_only=True)
class _SelectionScores:
    """A function of logits [T, E] and, where there is one, the selection bias [E]; the fields are arguments of
    `expert_routing`.
    """

    scores: str
    n_groups: int | None
    top_groups: int
    group_score_experts: int

    def __call__(self, logits: jax.Array, bias: jax.Array | None = None) -> jax.Array:
        biased = _scores(self.scores, logits)
        if bias is not None:
            biased = biased + bias.astype(biased.dtype)
        return biased if self.n_groups is None else self._mask_other_groups(biased, self.n_groups)

    def _mask_other_groups(self, biased_scores: jax.Array, groups: int) -> jax.Array:
        """Returns the scores, -inf for experts of groups that are not among the best."""
        grouped = biased_scores.reshape(biased_scores.shape[0], groups, -1)
        of_group = jax.lax.top_k(grouped, self.group_score_experts)[0].sum(axis=-1)
        best = jax.lax.top_k(of_group, self.top_groups)[1]
        chosen = (best[:, :, None] == jnp.arange(groups)).any(axis=1)
        return jnp.where(chosen[:, :, None], grouped, -jnp.inf).reshape(biased_scores.shape)


def weights(args: Any, experts: jax.Array) -> jax.Array:
    """Returns the weights of the chosen experts [T, K], differentiable in the logits.

    Args:
        args: The argument record of `expert_routing`, with scores.
        experts: [T, K], the chosen experts.
    """
    chosen = jnp.take_along_axis(scores(args), experts, axis=1)
    return compute_rows(functools.partial(_weights_of_scores, normalise=args.normalise, scale=args.scale), (chosen,))


def _weights_of_scores(chosen: jax.Array, *, normalise: bool, scale: float) -> jax.Array:
    if normalise:
        chosen = chosen / (chosen.sum(axis=-1, keepdims=True) + WEIGHT_SUM_EPSILON)
    return chosen * scale
