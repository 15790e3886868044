"""Kernels under `jax.vmap`: what is mapped becomes more rows of the batch, which one launch works on."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import custom_batching

from ejkernel import _compat


def run_with_batch_rows(
    run: Callable[[dict[str, jax.Array], int], tuple[jax.Array, ...]], operands: dict[str, jax.Array], batch: int
) -> tuple[jax.Array, ...]:
    """Returns what `run` makes of operands, by name, and of a number of batch rows; under `jax.vmap` of more rows,
    once.

    Args:
        run: A function of operands whose first axis is `batch`, or 1 for those that all rows share, and of `batch`.
        operands: The operands.
        batch: Rows.

    Returns:
        The outputs of `run`, whose first axis is `batch`.
    """

    def call(*arrays: jax.Array) -> tuple[jax.Array, ...]:
        return tuple(run(dict(zip(operands, arrays, strict=True)), batch))

    def run_with_mapped_rows_folded(
        size: int, mapped: list[bool], *arrays: jax.Array
    ) -> tuple[tuple[jax.Array, ...], tuple[bool, ...]]:
        batched_arrays = (_repeated_batch_rows(x, size, batch, m) for x, m in zip(arrays, mapped, strict=True))
        outputs = run_with_batch_rows(run, dict(zip(operands, batched_arrays, strict=True)), size * batch)
        return tuple(x.reshape(size, batch, *x.shape[1:]) for x in outputs), (True,) * len(outputs)

    mapping = custom_batching.custom_vmap(call)
    mapping.def_vmap(run_with_mapped_rows_folded)
    arrays = tuple(operands.values())
    return _compat.as_varying(mapping(*_compat.as_varying(arrays, arrays)), arrays)


def _repeated_batch_rows(x: jax.Array, size: int, batch: int, mapped: bool) -> jax.Array:
    """Returns an operand for `size` times `batch` rows."""
    if not mapped:
        if x.shape[0] == 1:
            return x
        x = jnp.broadcast_to(x, (size, *x.shape))
    elif x.shape[1] == 1:
        x = jnp.broadcast_to(x, (size, batch, *x.shape[2:]))
    return x.reshape(size * batch, *x.shape[2:])
