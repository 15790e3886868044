"""The shared code of the losses over the vocabulary: weights of tokens, and shapes of any rank."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ejkernel.modules.operations.shared.shapes import check_dtype, got
from ejkernel.ops.values import Condition

REDUCTIONS = ("mean", "sum", "none")


def as_signed_integer(name: str, value: Any) -> int:
    """Returns a Python integer of either sign.

    Raises:
        ValueError: The value is not an integer.
    """
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise ValueError(f"{name}: got {got(value)}, wants an int, fixed when the call is traced")
    return int(value)


def check_exactly_one(name: str, value: Any, other: str, other_value: Any) -> None:
    """Checks that a call gives one of two arguments.

    Raises:
        ValueError: The call passes both arguments, or neither.
    """
    if (value is None) == (other_value is None):
        raise ValueError(f"{name}: got {got(value)} with {other}={got(other_value)}, wants exactly one of the two")


def check_token_axes(name: str, array: Any, tokens: tuple[int, ...], *trailing_axes: int) -> None:
    """Checks that the axes of an array are the axes of the tokens and then the given axes.

    Raises:
        ValueError: The array has other axes.
    """
    wants, shape = (*tokens, *trailing_axes), getattr(array, "shape", None)
    if shape is None:
        raise ValueError(f"{name}: got {got(array)}, wants an array of shape {wants}")
    if tuple(shape) != wants:
        raise ValueError(f"{name}: got shape {tuple(shape)}, wants {wants}")


def check_token_weights(args: Any, tokens: tuple[int, ...]) -> None:
    """Checks `weights` and `attention_mask`.

    Raises:
        ValueError: One has another shape than the tokens, or a dtype that is none of numbers.
    """
    for name in ("weights", "attention_mask"):
        if (array := getattr(args, name)) is not None:
            check_token_axes(name, array, tokens)
    if args.weights is not None:
        check_dtype("weights", args.weights, jnp.floating, "a floating dtype")


def condition_of_targets(targets: Any, entries: int, ignore_index: int) -> Condition:
    """Returns the condition that targets are entries of the vocabulary, or are ignored."""

    def are_valid(xp: Any, targets: Any) -> Any:
        return xp.all(((targets >= 0) & (targets < entries)) | (targets == ignore_index))

    wants = f"entries from 0 to {entries - 1}, or ignore_index={ignore_index}"
    return Condition(name="targets", arrays=(targets,), holds=are_valid, wants=wants)


def token_weights(args: Any, dtype: Any) -> jax.Array | None:
    """Returns the weights times the mask in the dtype of sums; None where the call has neither."""
    inputs = [x.astype(dtype) for x in (args.weights, args.attention_mask) if x is not None]
    return functools.reduce(jnp.multiply, inputs) if inputs else None


def average_loss(weighted_sum: jax.Array, weights: jax.Array) -> jax.Array:
    """Returns a sum divided by the sum of weights; 0 if the weights are 0."""
    total = jnp.sum(weights)
    return jnp.where(total == 0, 0, weighted_sum / jnp.where(total == 0, 1, total))


def reduce_losses(losses: jax.Array, weights: jax.Array, args: Any) -> jax.Array:
    """Returns losses [...] times their weights, reduced as a call asks for; those of weight 0 count nothing."""
    weighted = jnp.where(weights == 0, 0, weights * losses)
    if args.reduction == "none":
        return weighted
    return jnp.sum(weighted) if args.reduction == "sum" else average_loss(jnp.sum(weighted), weights)


def token_axis_letters(rank: int) -> str:
    """Returns the axis letters of tokens with so many axes. The first is the slowest of the record's tokens, so that a
    part of it is a part of them.
    """
    return " ".join(["t", *"abcefghi"[: max(rank - 1, 0)]][:rank])


def sum_over_mesh_axis(x: jax.Array, axis: str | None) -> jax.Array:
    """Returns the sum over a mesh axis; what it is given where there is none."""
    return x if axis is None else lax.psum(x, axis)


def lse_over_devices(lse: jax.Array, axis: str) -> jax.Array:
    """Returns the log-sum-exp over the parts of a vocabulary that is split over a mesh axis."""
    largest = lax.pmax(lax.stop_gradient(lse), axis)
    finite = jnp.where(jnp.isneginf(largest), 0, largest)
    return jnp.log(lax.psum(jnp.exp(lse - finite), axis)) + finite
