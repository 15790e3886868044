"""Backward pass of a grouped matmul.

With do the cotangent of the output and w_g the scaled matrix of a group, over the rows i of that group:

    dx_i   = do_i w_g^T,           dlhs_i = dx_i * lhs_scale_i,   dlhs_scale_i = sum over each block of dx_i * lhs_i
    dw_g   = sum_i x_i^T do_i,     drhs_g = dw_g * rhs_scale_g,   drhs_scale_g = sum over each block of dw_g * rhs_g
    dbias  = sum_i do_i

Unassigned rows have a gradient of 0, but that of `existing_out` is do everywhere.
"""

import jax
import jax.numpy as jnp
from jax import lax

from ejkernel.families.grouped_matmul import (
    GroupedMatmul,
    accumulator,
    columns,
    group_row_bounds,
    lhs_and_scale_gradients,
    spread,
)
from ejkernel.types.pullback import Pullback
from ejkernel_xla.grouped_matmul.config import RowTiles, sizes
from ejkernel_xla.grouped_matmul.forward import missing_rows, with_more_rows
from ejkernel_xla.grouped_matmul.kernels.groups import RowTile, dot, fold_groups, fold_row_tiles, load

Gradients = dict[str, jax.Array]
ROW_FIELDS = ("lhs", "lhs_scale")
"""Gradients that each tile has rows of; the others are sums over a group's tiles."""


def backward(pullback: Pullback, config: RowTiles) -> Gradients:
    """Returns gradients of the requested fields of a record.

    Args:
        pullback: Record, cotangent [M, N], and the requested names.
        config: Rows per tile.

    Returns:
        Each requested gradient, in its field's shape and dtype.
    """
    record, cotangent = pullback.record, pullback.cotangent
    grads = _gradients(record, cotangent, pullback.grad_fields - {"existing_out"}, config)
    if "existing_out" in pullback.grad_fields:
        grads["existing_out"] = cotangent.astype(record.existing_out.dtype)
    return grads


def _gradients(record: GroupedMatmul, cotangent: jax.Array, fields: frozenset[str], config: RowTiles) -> Gradients:
    """Returns gradients of the requested fields, but for `existing_out`."""
    rows = record.lhs.shape[0]
    if missing := missing_rows(record, config):
        cotangent = jnp.pad(cotangent, ((0, missing), (0, 0)))
        grads = _tile_gradients(with_more_rows(record, missing), cotangent, fields, config)
        return {name: x[:rows] if name in ROW_FIELDS else x for name, x in grads.items()}
    return _tile_gradients(record, cotangent, fields, config)


def _tile_gradients(record: GroupedMatmul, cotangent: jax.Array, fields: frozenset[str], config: RowTiles) -> Gradients:
    """Returns the gradients of a record whose rows fill a tile."""
    grads = {name: jnp.zeros_like(getattr(record, name)) for name in sorted(fields)}
    rows = record.lhs.shape[0]
    if rows and grads:

        def group(g: jax.Array, first: jax.Array, end: jax.Array, grads: Gradients) -> Gradients:
            def add_row_tile(at: RowTile, carry: tuple[Gradients, Gradients]) -> tuple[Gradients, Gradients]:
                return _add_tile_gradients(record, weights, at, jnp.where(at.valid, at.take(cotangent), 0), carry)

            # Loaded, and scaled, once a group; its gradient is an accumulator that all of the group's tiles add to.
            weights = load(record, g)
            start = (_zero_accumulators(record, grads), {name: x for name, x in grads.items() if name in ROW_FIELDS})
            sums, lhs = fold_row_tiles(first, end, sizes(record, config), rows, add_row_tile, start)
            return {**_store_group_gradients(record, g, sums, grads), **lhs}

        grads = fold_groups(*group_row_bounds(record), group, grads)
    return grads


def _zero_accumulators(record: GroupedMatmul, grads: Gradients) -> Gradients:
    """Returns zeroed accumulators for a group's gradients, which are sums over its rows."""
    dtype, sums = accumulator(record), {}
    if grads.keys() & {"rhs", "rhs_scale"}:
        sums["weights"] = jnp.zeros(record.rhs.shape[1:], dtype)
    if "rhs_bias" in grads:
        sums["bias"] = jnp.zeros((1, columns(record)), dtype)
    return sums


def _add_tile_gradients(
    record: GroupedMatmul, weights: jax.Array, at: RowTile, cotangent: jax.Array, carry: tuple[Gradients, Gradients]
) -> tuple[Gradients, Gradients]:
    """Adds a row tile's contribution to the gradients; `cotangent` is 0 in rows that are not valid."""
    sums, lhs = (dict(part) for part in carry)
    if lhs:
        product = dot(record, cotangent, weights, (1, 0 if record.transpose_rhs else 1))
        gradients = _row_gradients(record, product, at)
        lhs = {name: at.put(x, gradients[name]) for name, x in lhs.items()}
    if "weights" in sums:
        # The cotangent is 0 in rows that are not valid, but 0 x NaN of another group's rows would be NaN.
        rows = jnp.where(at.valid, at.rows(record), 0)
        pair = (cotangent, rows) if record.transpose_rhs else (rows, cotangent)
        sums["weights"] = sums["weights"] + dot(record, *pair, (0, 0))
    if "bias" in sums:
        sums["bias"] = sums["bias"] + jnp.sum(cotangent, axis=0, keepdims=True, dtype=sums["bias"].dtype)
    return sums, lhs


def _row_gradients(record: GroupedMatmul, product: jax.Array, at: RowTile) -> Gradients:
    """Returns gradients of a tile's rows and of their scales, from that of the product of the two."""
    scale = at.scales(record)
    if scale is None:
        return {"lhs": product}
    return lhs_and_scale_gradients(record, product, at.take(record.lhs), scale, at.start)


def _store_group_gradients(record: GroupedMatmul, g: jax.Array, sums: Gradients, grads: Gradients) -> Gradients:
    """Stores the gradients of group g's matrix, scales and bias in `grads`, and returns the updated `grads`."""
    gradients, scale = {}, None
    if record.rhs_scale is not None:
        scale = lax.dynamic_index_in_dim(record.rhs_scale, g, keepdims=False).astype(accumulator(record))
    if "rhs" in grads:
        gradients["rhs"] = sums["weights"] if scale is None else sums["weights"] * spread(record, scale)
    if scale is not None and "rhs_scale" in grads:
        rhs = lax.dynamic_index_in_dim(record.rhs, g, keepdims=False).astype(scale.dtype)
        shares = sums["weights"] * rhs
        shares = shares.T if record.transpose_rhs else shares
        gradients["rhs_scale"] = shares.reshape(scale.shape[0], -1, scale.shape[2]).sum(axis=1, keepdims=True)
    if "rhs_bias" in grads:
        gradients["rhs_bias"] = sums["bias"]
    stored = {
        name: lax.dynamic_update_index_in_dim(grads[name], x.astype(grads[name].dtype), g, 0)
        for name, x in gradients.items()
    }
    return {**grads, **stored}
