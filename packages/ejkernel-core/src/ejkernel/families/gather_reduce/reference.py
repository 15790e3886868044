"""Defines what gather and reduce computes, in plain jnp.

Every token names K rows, and gets their weighted sum:

    o_t = sum over n of w_tn x_r          r = i_tn

An index outside of 0..R-1 names no row. Sums are taken in float32 (float64 for float64 rows), in the order of n. The
gradient of a row is the same sum the other way round, over the pairs (t, n) that name it:

    dx_r = sum over (t, n) with i_tn = r of w_tn do_t          dw_tn = <x_r, do_t>

`inverse` lists these pairs, so both passes gather, and neither adds to memory out of order: two runs give the same
bits.

Source: dispatch and combine of the dropless mixture of experts of Gale et al. 2022, arXiv:2211.15841 (MegaBlocks).
"""

import jax
import jax.numpy as jnp

from ejkernel.families.gather_reduce.record import GatherReduce, accumulator, is_valid_index, take_rows


def reference(record: GatherReduce) -> tuple[jax.Array, tuple[()]]:
    """Computes the result of the family in plain jnp, all named rows at once; in float64 if `rows` is float64, else in
    float32.

    Returns:
        [T, D] in the rows' dtype. There are no residuals.
    """
    valid = is_valid_index(record.indices, record.rows.shape[0])
    rows = take_rows(record.rows.astype(accumulator(record)), record.indices)
    weights = jnp.ones(valid.shape, rows.dtype) if record.weights is None else record.weights.astype(rows.dtype)
    # Rows and weights are both masked, because a row or a weight that no index names may hold NaN.
    terms = rows * jnp.where(valid, weights, 0)[..., None]
    return jnp.sum(terms, axis=1).astype(record.rows.dtype), ()
