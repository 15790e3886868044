"""The order in which blocks add to a tile of queries, as a table that their kernel reads."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel_pallas.gpu.tiled_attention.masks.segment_extents import MINIMUM, reduced


def first_visitors(visits: Any, count: int) -> Any:
    """The first tile of keys that visits a tile of queries; those that do come one after the other.

    Args:
        visits: Table of the tiles of queries that tiles of keys visit, [B|1, key tiles, 4]; a NumPy array where it is
            known when a call is traced.
        count: Tiles of queries.

    Returns:
        Int32 [B|1, query tiles]: the number of all tiles of keys where none does.
    """
    keys, query = visits.shape[1], np.arange(count, dtype=np.int32)[:, None]
    visited = (visits[:, None, :, 0] <= query) & (query < visits[:, None, :, 3])
    where = jnp.where if isinstance(visits, jax.Array) else np.where
    (first,) = reduced([where(visited, np.arange(keys, dtype=np.int32), keys)], (MINIMUM,))
    return first
