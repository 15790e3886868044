"""Steps that all backward passes share: delta, sinks, and outputs that are not normalised."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.types.pullback import Pullback


def subtract_lse_cotangent(delta: jax.Array, pullback: Pullback) -> jax.Array:
    """Returns delta [B, H, T] minus the cotangent of lse, whose derivative by the score s_ij is p_ij; delta without
    one.

    A row with nothing to attend has no gradient, whatever the cotangent of its lse holds.
    """
    cotangent, lse = pullback.lse_cotangent, pullback.residuals.lse
    return delta if cotangent is None else delta - jnp.where(lse == -jnp.inf, 0, cotangent)


def split_unnormalised_backward(pullback: Pullback) -> tuple[Pullback, Pullback]:
    """Returns two backward passes whose gradients add up: of an output that is not normalised, and of its lse.

    Their scores are shifted differently, by the maximum and by lse, so that no kernel has both.
    """
    normal = dataclasses.replace(pullback.record, normalize_output=True)
    zeros = jnp.zeros_like(pullback.cotangent)
    return (
        dataclasses.replace(pullback, lse_cotangent=None),
        dataclasses.replace(pullback, record=normal, output=zeros, cotangent=zeros),
    )


def unnormalised_gradients(
    backward: Callable[[Pullback, Any], dict[str, jax.Array]], pullback: Pullback, config: Any
) -> dict[str, jax.Array]:
    """Returns the gradients of a pullback whose output is not normalised and whose lse has a cotangent."""
    first, second = (backward(part, config) for part in split_unnormalised_backward(pullback))
    return {name: jax.tree.map(jnp.add, first[name], second[name]) for name in sorted(pullback.grad_fields)}


def sinks_gradient(pullback: Pullback, delta: jax.Array) -> jax.Array:
    """Returns gradient of the sinks, [H]: `-sum_i exp(sink_h - lse_i) (delta_i - dlse_i)`.

    Args:
        pullback: Of a record with sinks.
        delta: [B, H, T], the product of each row's output and its cotangent.
    """
    sinks, lse = pullback.record.softmax_aux, pullback.residuals.lse
    if not pullback.record.normalize_output:  # subtracting the maximum is part of its meaning
        return jnp.zeros_like(sinks)
    share = jnp.exp(sinks[:, None] - jnp.where(lse == -jnp.inf, 0, lse)) * subtract_lse_cotangent(delta, pullback)
    return -share.sum(axis=(0, 2)).astype(sinks.dtype)
