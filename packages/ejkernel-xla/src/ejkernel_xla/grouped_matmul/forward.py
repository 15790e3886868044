"""Forward pass of a grouped matmul."""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from ejkernel.arithmetic import is_symbolic
from ejkernel.families.grouped_matmul import GroupedMatmul, accumulator, columns, group_row_bounds
from ejkernel_xla.grouped_matmul.config import RowTiles, sizes
from ejkernel_xla.grouped_matmul.kernels.groups import RowTile, dot, fold_groups, fold_row_tiles, load


def forward(record: GroupedMatmul, config: RowTiles) -> tuple[jax.Array, tuple[()]]:
    """Returns the output of a record.

    Args:
        record: The canonical arguments.
        config: Rows per tile.

    Returns:
        [M, N] in the record's `out_dtype`. There are no residuals.
    """
    rows = record.lhs.shape[0]
    if missing := missing_rows(record, config):
        return _forward(with_more_rows(record, missing), config)[:rows], ()
    return _forward(record, config), ()


def missing_rows(record: GroupedMatmul, config: RowTiles) -> int:
    """Returns how many rows a record has to get so that there is one tile of them at least."""
    rows = record.lhs.shape[0]
    if is_symbolic(rows):  # there may be a single one
        return config.block_m - 1
    return config.block_m - rows if config.batch_invariant and 0 < rows < config.block_m else 0


def _forward(record: GroupedMatmul, config: RowTiles) -> jax.Array:
    """Returns the output of a record whose rows fill a tile."""
    rows = record.lhs.shape[0]
    existing_output = jnp.zeros((rows, columns(record))) if record.existing_out is None else record.existing_out
    output = existing_output.astype(record.out_dtype)
    if rows == 0:
        return output
    contracted = 1 if record.transpose_rhs else 0

    def group(g: jax.Array, first: jax.Array, end: jax.Array, output: jax.Array) -> jax.Array:
        weights, bias = load(record, g), _bias_of_group(record, g)

        def tile(at: RowTile, output: jax.Array) -> jax.Array:
            product = dot(record, at.rows(record), weights, (1, contracted))
            if bias is not None:
                product = product + bias
            if record.existing_out is not None:
                product = product + at.take(record.existing_out).astype(product.dtype)
            return at.put(output, product)

        return fold_row_tiles(first, end, sizes(record, config), rows, tile, output)

    return fold_groups(*group_row_bounds(record), group, output)


def with_more_rows(record: GroupedMatmul, count: int) -> GroupedMatmul:
    """Returns the record with `count` more rows at the end, which are unassigned, so that a tile has room."""
    names = [name for name in ("lhs", "lhs_scale", "existing_out") if getattr(record, name) is not None]
    padded = {name: jnp.pad(getattr(record, name), ((0, count), (0, 0))) for name in names}
    return dataclasses.replace(record, **padded)


def _bias_of_group(record: GroupedMatmul, g: jax.Array) -> jax.Array | None:
    """Returns what is added to the rows of a group, [1, N]."""
    if record.rhs_bias is None:
        return None
    return lax.dynamic_index_in_dim(record.rhs_bias, g, keepdims=False).astype(accumulator(record))
