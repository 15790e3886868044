"""How many query heads of one KV head a tile of scores has."""

from ejkernel.families.paged_attention import PagedAttention
from ejkernel.planning import paged_cache

HEADS, LATENT_HEADS, FLOAT32_HEADS = 128, 64, 16
"""Most query heads of one KV head in a tile. Accumulators of 128 heads and 512 latent columns would fill the registers
of a multiprocessor. Two programs of 64 heads each read the same keys at about the same time, once from HBM."""


def group_of(record: PagedAttention) -> int:
    """Query heads of one KV head in a tile: all of them, or an even part where they are too many."""
    group = record.query.shape[1] // paged_cache.kv_heads(record)
    most = HEADS if record.latent is None else LATENT_HEADS if record.query.dtype.itemsize == 2 else FLOAT32_HEADS
    return next(group // parts for parts in range(1, group + 1) if group % parts == 0 and group // parts <= most)
