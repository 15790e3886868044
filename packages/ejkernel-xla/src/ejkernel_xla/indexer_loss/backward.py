"""Backward pass of the indexer's loss: the gradient of the scores, from attention's weights of the forward pass."""

import dataclasses
from typing import Any

import jax

from ejkernel.families.indexer_loss import indexer_loss_per_query
from ejkernel.types.pullback import Pullback


def backward(pullback: Pullback, config: Any) -> dict[str, jax.Array]:
    """Returns the gradient of the scores.

    Args:
        pullback: Record, residuals, the cotangent [B, T] of the losses, and the requested names.
        config: Not read.

    Returns:
        `{"scores": [B, T, K]}` in the field's dtype.
    """
    record, target = pullback.record, pullback.residuals.target
    _, pull = jax.vjp(
        lambda scores: indexer_loss_per_query(dataclasses.replace(record, scores=scores), target), record.scores
    )
    return {"scores": pull(pullback.cotangent)[0]}
