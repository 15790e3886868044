"""The cross-entropy of logits that a caller's function makes, a block of tokens at a time."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.arithmetic import cdiv
from ejkernel.modules.operations.shared.shapes import as_count
from ejkernel.modules.operations.shared.token_losses import check_exactly_one, check_token_axes, condition_of_targets
from ejkernel.ops.values import check_conditions

TOKENS_PER_BLOCK = 1024
"""Tokens in a block, unless the call says how many."""

TOKEN_FIELDS = ("targets", "weights", "attention_mask", "soft_targets")


def head_function_loss(loss: Callable[..., Any], arguments: dict[str, Any]) -> Any:
    """Returns the losses of a call with `lm_head_fn`.

    Args:
        loss: `fused_cross_entropy`.
        arguments: All arguments of the call, by name.

    Raises:
        ValueError: The call gives logits or a head as well, or a mesh; or no hidden states; or a shape is wrong.
    """
    options = {name: value for name, value in arguments.items() if name not in ("lm_head_fn", "hidden", "chunk_size")}
    function, hidden = arguments["lm_head_fn"], arguments["hidden"]
    if not callable(function):
        raise ValueError(f"lm_head_fn: got {type(function).__name__}, wants a function of hidden states [n, D]")
    for name in ("lm_head_weight", "lm_head_bias", "compute_dtype", "mesh", "in_specs", "out_specs"):
        if options[name] is not None:
            raise ValueError(f"{name}: got a value with lm_head_fn, wants None: the function computes the logits")
    check_exactly_one("logits", options.pop("logits"), "hidden", hidden)
    shape, reduction = tuple(hidden.shape[:-1]), options.pop("reduction")
    size = max(1, min(as_count("chunk_size", arguments["chunk_size"]) or TOKENS_PER_BLOCK, hidden[..., 0].size))
    per_token = {name: options.pop(name) for name in TOKEN_FIELDS}
    for name, array in per_token.items():
        if array is not None:
            check_token_axes(name, array, shape, *(array.shape[-1:] if name == "soft_targets" else ()))
    if per_token["weights"] is None:
        per_token["weights"] = jnp.ones(shape, jnp.promote_types(hidden.dtype, jnp.float32))
    blocks = {
        name: _split_rows_into_blocks(x.reshape(-1, *x.shape[len(shape) :]), size)
        for name, x in {"hidden": hidden, **per_token}.items()
        if x is not None
    }

    _check_logits_and_targets(function, blocks["hidden"], per_token["targets"], options)

    @jax.checkpoint
    def loss_of_block(block: dict[str, jax.Array]) -> Any:
        # A token of weight 0 may hold NaN, which would reach the gradients of what the function closes over.
        logits: Any = function(jnp.where(_counts(block, options["ignore_index"])[:, None], block.pop("hidden"), 0))
        return loss(logits, **block, **options, reduction="none" if reduction == "none" else "sum")

    results = jax.lax.map(loss_of_block, blocks)
    return _results_of_blocks(results, reduction, shape)


def _results_of_blocks(results: Any, reduction: str, shape: tuple[int, ...]) -> Any:
    """Returns the results of a call from those of its blocks; `shape` is that of the tokens."""
    weight_sum = jnp.sum(results.weight_sum)
    total = jnp.where(weight_sum == 0, 1, weight_sum)
    accuracy = None if results.accuracy is None else jnp.sum(results.accuracy * results.weight_sum) / total
    if reduction == "none":
        loss_, z_loss = (x.reshape(-1)[: math.prod(shape)].reshape(shape) for x in (results.loss, results.z_loss))
    else:
        loss_, z_loss = (jnp.sum(x) / (total if reduction == "mean" else 1) for x in (results.loss, results.z_loss))
    return type(results)(loss_, z_loss, weight_sum, accuracy)


def _check_logits_and_targets(function: Callable[..., Any], hidden: jax.Array, targets: Any, options: Any) -> None:
    """Checks, before any block runs, the shape of the logits and the targets whose values can be read.

    In the loop over blocks targets are traced. The vocabulary's size is that of the logits, for which the function is
    traced once more.

    Args:
        function: From hidden states to logits.
        hidden: [blocks, tokens, D].
        targets: [...] integers, or None.
        options: The call's options.

    Raises:
        ValueError: The logits have another shape, or a target is not in the vocabulary.
    """
    logits: Any = jax.eval_shape(lambda hidden: jax.lax.map(function, hidden), hidden)
    size, shape = hidden.shape[1], tuple(logits.shape[1:])
    if len(shape) != 2 or shape[0] != size:
        raise ValueError(f"lm_head_fn: got logits of shape {shape}, wants [{size}, V]")
    if targets is not None and options["vocab_parallel_axis"] is None:
        check_conditions((condition_of_targets(targets, shape[1], options["ignore_index"]),))


def _counts(block: dict[str, jax.Array], ignore_index: int) -> jax.Array:
    """Returns whether each token has a weight other than 0."""
    counts = block["weights"] != 0
    if "attention_mask" in block:
        counts &= block["attention_mask"] != 0
    return counts & (block["targets"] != ignore_index) if "targets" in block else counts


def _split_rows_into_blocks(rows: jax.Array, size: int) -> jax.Array:
    """Returns rows as [n, size, ...]; what is missing of the last block is 0, and has weight 0."""
    missing = cdiv(rows.shape[0], size) * size - rows.shape[0]
    rows = jnp.pad(rows, ((0, missing), *((0, 0),) * (rows.ndim - 1)))
    return rows.reshape(-1, size, *rows.shape[1:])
