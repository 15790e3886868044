"""The order in which blocks add to a tile of queries, as a table that their kernel reads."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel_pallas.gpu.tiled_attention.plan.segment_extents import MIN_REDUCTION, reduce_last_axis


def find_first_dq_adders(block_ranges: Any, num_query_blocks: int) -> Any:
    """Returns the first key tile that adds to the dq of each query block; those that do are contiguous.

    Args:
        block_ranges: Table of the query blocks of every key tile, [B|1, key tiles, 4]; a NumPy array if it is known
            when a call is traced.
        num_query_blocks: Tiles of queries.

    Returns:
        Int32 [B|1, query tiles]: the number of key tiles if none adds.
    """
    keys, query = block_ranges.shape[1], np.arange(num_query_blocks, dtype=np.int32)[:, None]
    # Those that add are contiguous, so the first of them gives every key tile its index in the order.
    has_pairs = (block_ranges[:, None, :, 0] <= query) & (query < block_ranges[:, None, :, 3])
    numpy_or_jax_where = jnp.where if isinstance(block_ranges, jax.Array) else np.where
    (first,) = reduce_last_axis(
        [numpy_or_jax_where(has_pairs, np.arange(keys, dtype=np.int32), keys)], (MIN_REDUCTION,)
    )
    return first
