"""The gather-reduce family: the record its operations lower to and its meaning.

Every token names K rows, and gets their weighted sum:

    o_t = sum over n of w_tn x_r          r = i_tn

An index outside of 0..R-1 names no row. Sums are taken in float32 (float64 for float64 rows), in the order of n. The
gradient of a row is the same sum the other way round, over the pairs (t, n) that name it:

    dx_r = sum over (t, n) with i_tn = r of w_tn do_t          dw_tn = <x_r, do_t>

`inverse` lists these pairs, so both passes gather, and neither adds to memory out of order: two runs give the same
bits.

Source: dispatch and combine of the dropless mixture of experts of Gale et al. 2022, arXiv:2211.15841 (MegaBlocks).
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.ops.arguments import arguments
from ejkernel.ops.model import Family
from ejkernel.planning.requests import PADDING, UNUSED, claimed


@arguments
class GatherReduce:
    """Canonical input of one gather-reduce. R rows of D channels, T tokens that name K rows each.

    Attributes:
        rows: [R, D] floating.
        indices: [T, K] int32, the rows that a token names; outside of 0..R-1 for none.
        inverse: [R, M] int32, the pairs that name a row, `t * K + n`; outside of 0..T*K-1 for none.
        weights: [T, K] floating; None for ones.
    """

    rows: jax.Array
    indices: jax.Array
    inverse: jax.Array
    weights: jax.Array | None = None


def accumulator(record: GatherReduce) -> Any:
    """The dtype of sums: float32, or float64 for float64 rows."""
    return jnp.promote_types(record.rows.dtype, jnp.float32)


def named(index: jax.Array, count: int) -> jax.Array:
    """Where an index names one of `count` rows or pairs."""
    return (index >= 0) & (index < count)


def take_rows(rows: jax.Array, index: jax.Array) -> jax.Array:
    """Rows by their index, 0 for an index that names none; there may be none at all."""
    valid = named(index, rows.shape[0])
    if not rows.shape[0]:
        return jnp.zeros((*index.shape, *rows.shape[1:]), rows.dtype)
    taken = rows[jnp.where(valid, index, 0)]
    return jnp.where(valid.reshape(*valid.shape, *(1,) * (rows.ndim - 1)), taken, 0)


def reference(record: GatherReduce) -> tuple[jax.Array, tuple[()]]:
    """The family's meaning in plain jnp, all named rows at once; float64 if rows is, else float32.

    Returns:
        [T, D] in the rows' dtype. There are no residuals.
    """
    valid = named(record.indices, record.rows.shape[0])
    rows = take_rows(record.rows.astype(accumulator(record)), record.indices)
    weights = jnp.ones(valid.shape, rows.dtype) if record.weights is None else record.weights.astype(rows.dtype)
    # Both are masked: neither a row nor a weight that is not named may bring in a NaN.
    terms = rows * jnp.where(valid, weights, 0)[..., None]
    return jnp.sum(terms, axis=1).astype(record.rows.dtype), ()


def localise(record: GatherReduce, offsets: Mapping[str, jax.Array]) -> GatherReduce:
    """One shard's record as it is: channels know nothing of each other."""
    return record


def requests(record: GatherReduce) -> tuple[dict[str, Any], ...]:
    """The owners of a record's entries: the tokens, with the rows that only one of them names."""
    indices, owners = np.asarray(record.indices), np.full(record.rows.shape[0], UNUSED)
    for token, row in np.argwhere(np.ones(indices.shape, bool)):
        if 0 <= indices[token, row] < owners.size:
            claimed(owners, indices[token, row], token)
    # Rows that no token names have no gradient.
    return ({"m": np.where(owners == UNUSED, PADDING, owners), "t": np.arange(indices.shape[0])},)


FAMILY = Family(
    name="gather_reduce",
    record=GatherReduce,
    differentiable=("rows", "weights"),
    dtype=lambda record: record.rows.dtype,
    head_dims=lambda record: (record.rows.shape[-1],),
    axes={"rows": "m d", "indices": "t k", "inverse": "m n", "weights": "t k", "output": "t d"},
    shardable="d",
    aligned=(),
    localise=localise,
    reference=reference,
    requests=requests,
)
