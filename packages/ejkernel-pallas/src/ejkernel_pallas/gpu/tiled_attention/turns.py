"""The order in which blocks add to a tile of queries, as a table that their kernel reads."""

from typing import Any

import jax.numpy as jnp
import numpy as np


def turns(visits: Any, count: int) -> tuple[Any, Any]:
    """How many blocks come before a block, and whether any comes at all.

    Args:
        visits: Table of the tiles of queries that tiles of keys visit, [B|1, key tiles, 4]; a NumPy array where it is
            known when a call is traced.
        count: Tiles of queries.

    Returns:
        Int32 [B|1, key tiles, query tiles], the earlier tiles of keys that visit a tile of queries, or, where those are
        all from a first one on, that one, [1, 1, query tiles]; and bool [B|1, query tiles].
    """
    xp = np if isinstance(visits, np.ndarray) else jnp
    index = np.arange(count, dtype=np.int32)
    visited = (visits[:, :, :1] <= index) & (index < visits[:, :, 3:])
    ranks, some = xp.cumsum(visited, axis=1, dtype=np.int32) - visited, visited.any(axis=1)
    if isinstance(ranks, np.ndarray):
        first, key = visited.argmax(axis=1).astype(np.int32)[:, None], np.arange(visits.shape[1])[:, None]
        if (ranks == key - first)[visited].all():
            return first, some
    return ranks, some


def rank(ranks: Any, row: Any, key: Any, query: Any) -> Any:
    """How many blocks add to a tile of queries before the one that owns a tile of keys."""
    return key - ranks[row, 0, query] if ranks.shape[1] == 1 else ranks[row, key, query]
