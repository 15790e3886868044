"""Gather-reduce in XLA."""

from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.families.gather_reduce import FAMILY, GatherReduce, accumulator
from ejkernel_xla.fixed_tiles import RowOrder, forward_in_tiles
from ejkernel_xla.gather_reduce.kernels.row_sums import column, rows_times_weights, sum_of_terms


def forward(record: GatherReduce, config: RowOrder) -> tuple[jax.Array, tuple[()]]:
    """Returns sums of a record.

    Args:
        record: The canonical arguments.
        config: Whether tokens are computed in tiles of fixed sizes.

    Returns:
        [T, D] in the rows' dtype. There are no residuals.
    """
    if config.batch_invariant:
        return forward_in_tiles(_sums, record, FAMILY.axes_of(record), "t"), ()
    return _sums(record), ()


def _sums(record: GatherReduce) -> jax.Array:
    dtype = accumulator(record)

    def term(n: Any) -> jax.Array:
        index, weights = column(record.indices, n), record.weights
        return rows_times_weights(record.rows, index, None if weights is None else column(weights, n), dtype)

    empty = jnp.zeros((record.indices.shape[0], record.rows.shape[1]), dtype)
    return sum_of_terms(term, record.indices.shape[1], empty).astype(record.rows.dtype)
