"""The keys with the largest scores of whole rows of scores, selected by a threshold instead of a sort.

    threshold   the K-th largest score of a row, found bit by bit: the largest number that K scores reach
    selected    the scores above the threshold, and as many equal to it as are missing, the lowest index first
    sorted      only the selected scores, [t, K]

Each bit counts the scores of a row once, so a row of S scores is read as often as a score has bits. A sort of the row
would move it about as often, with the indices: on an H200 it takes ten times as long for 32768 scores.
"""

import jax
import jax.numpy as jnp
from jax import lax

from ejkernel_xla.lightning_indexer.kernels.running_top_k import RunningTopK


def select(in_order: jax.Array, top_k: int) -> RunningTopK:
    """Returns the selection from rows of scores.

    Args:
        in_order: [t, S], scores as integers in the order of numbers; the least integer where a key is not selectable.
        top_k: K.
    """
    threshold = _find_threshold(in_order, top_k)[:, None]
    is_above, is_equal = in_order > threshold, in_order == threshold
    num_missing = top_k - jnp.sum(is_above, axis=1, keepdims=True, dtype=jnp.int32)
    is_selected = is_above | (is_equal & (jnp.cumsum(is_equal, axis=1, dtype=jnp.int32) <= num_missing))
    # The n-th selected key is where the count of selected keys becomes n.
    num_selected = jnp.cumsum(is_selected, axis=1, dtype=jnp.int32)
    nth = jnp.arange(1, top_k + 1, dtype=jnp.int32)
    indices = jax.vmap(lambda row: jnp.searchsorted(row, nth, method="scan_unrolled"))(num_selected).astype(jnp.int32)
    nothing = jnp.iinfo(in_order.dtype).min
    scores = jnp.take_along_axis(in_order, indices, axis=1, mode="fill", fill_value=nothing)
    # Of equal scores `lax.top_k` takes the first, which has the lower index.
    largest, at = lax.top_k(scores, top_k)
    return RunningTopK(largest, jnp.take_along_axis(indices, at, axis=1))


def _find_threshold(in_order: jax.Array, top_k: int) -> jax.Array:
    """Returns the largest number of each row that K entries reach, [t]; the least one where there are fewer."""
    bits = jnp.iinfo(in_order.dtype).bits
    unsigned = jnp.dtype(f"uint{bits}")
    sign = jnp.array(1 << (bits - 1), unsigned)
    # With the sign bit inverted, the order of unsigned numbers is that of signed ones.
    ordered = lax.bitcast_convert_type(in_order, unsigned) ^ sign

    def set_bit(n: jax.Array, threshold: jax.Array) -> jax.Array:
        with_bit = threshold | (jnp.array(1, unsigned) << (bits - 1 - n).astype(unsigned))
        count = jnp.sum(ordered >= with_bit[:, None], axis=1, dtype=jnp.int32)
        return jnp.where(count >= top_k, with_bit, threshold)

    found = lax.fori_loop(0, bits, set_bit, jnp.zeros(in_order.shape[0], unsigned))
    return lax.bitcast_convert_type(found ^ sign, in_order.dtype)
