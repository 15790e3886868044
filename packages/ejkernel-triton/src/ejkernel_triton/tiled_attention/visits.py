"""Which tiles a program visits, and which of those need no masking, as small tables that the kernels read."""

from typing import Any

import numpy as np

from ejkernel.families.tiled_attention import TiledAttention
from ejkernel.planning.tile_pairs import sorted_pairs


def key_visits(record: TiledAttention, q_block: int, kv_block: int) -> Any:
    """For every query tile the key tiles to visit: int32 [B|1, query tiles, 4], as `_runs` gives them."""
    some, every, xp = sorted_pairs(record, q_block, kv_block)
    return _runs(some, every, xp)


def query_visits(record: TiledAttention, q_block: int, kv_block: int) -> Any:
    """For every key tile the query tiles to visit: int32 [B|1, key tiles, 4]."""
    some, every, xp = sorted_pairs(record, q_block, kv_block)
    return _runs(some.swapaxes(1, 2), every.swapaxes(1, 2), xp)


def _runs(some: Any, every: Any, xp: Any) -> Any:
    """The span of tiles that have work, `[first, last)`, and the first run of full tiles in it, `[clear, unclear)`.

    Int32 [B|1, tiles, 4]: first, clear, unclear, last. Where nothing is full, both ends of the run are `last`.
    """
    count = some.shape[-1]
    index = np.arange(count, dtype=np.int32)
    last = xp.where(some, index + 1, 0).max(axis=-1)
    first = xp.minimum(xp.where(some, index, count).min(axis=-1), last)
    clear = xp.where(every, index, count).min(axis=-1)
    unclear = xp.where(~every & (index > clear[..., None]), index, count).min(axis=-1)
    none = clear == count
    clear, unclear = xp.where(none, last, clear), xp.where(none, last, unclear)
    return xp.stack([first, clear, unclear, last], axis=-1).astype(np.int32)
