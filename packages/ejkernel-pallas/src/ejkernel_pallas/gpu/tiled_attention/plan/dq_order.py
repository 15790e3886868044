"""The order in which blocks add to a tile of queries, as a table that their kernel reads."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel_pallas.gpu.tiled_attention.plan.segment_extents import MINIMUM, reduced


def first_adders(ranges: Any, count: int) -> Any:
    """Returns the first key tile that adds to the dq of a query block; those that do come one after the other.

    Args:
        ranges: Table of the query blocks of every key tile, [B|1, key tiles, 4]; a NumPy array where it is
            known when a call is traced.
        count: Tiles of queries.

    Returns:
        Int32 [B|1, query tiles]: the number of all tiles of keys where none does.
    """
    keys, query = ranges.shape[1], np.arange(count, dtype=np.int32)[:, None]
    # Those that add are neighbours, so the first of them gives every key tile its place in the order.
    adds = (ranges[:, None, :, 0] <= query) & (query < ranges[:, None, :, 3])
    where = jnp.where if isinstance(ranges, jax.Array) else np.where
    (first,) = reduced([where(adds, np.arange(keys, dtype=np.int32), keys)], (MINIMUM,))
    return first
