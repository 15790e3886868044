"""How many query heads of one KV head a tile of scores has."""

from ejkernel.families.paged_attention import PagedAttention
from ejkernel.families.paged_attention import pages as paged_cache
from ejkernel_triton.chips import KIBI, Chip
from ejkernel_triton.sizes import padded

HEADS, LATENT_HEADS, FLOAT32_LATENT_HEADS = 128, 64, 16
"""Most query heads of one KV head in a tile. Accumulators of 128 heads and 512 latent columns would fill the registers
of a multiprocessor. Two programs of 64 heads each read the same keys at about the same time, once from HBM."""

FLOAT32_QUERIES = 8 * KIBI
"""Most elements of a tile of float32 queries, of which shared memory holds two parts."""


def group_of(record: PagedAttention, chip: Chip) -> int:
    """Query heads of one KV head in a tile: all of them, or an even part where they are too many for the chip."""
    group = record.query.shape[1] // paged_cache.kv_heads(record)
    most = _most_heads(record, chip)
    return next(group // parts for parts in range(1, group + 1) if group % parts == 0 and group // parts <= most)


def _most_heads(record: PagedAttention, chip: Chip) -> int:
    wide = max(record.query.dtype.itemsize, record.key_pages.dtype.itemsize) > 2
    if record.latent is not None:
        most = FLOAT32_LATENT_HEADS if wide else LATENT_HEADS
    else:
        most = min(HEADS, max(16, FLOAT32_QUERIES // padded(record.query.shape[-1]))) if wide else HEADS
    if chip.vendor == "amd":
        return most
    # The accumulator passes through shared memory in float32, of as many heads as a power of two.
    held = (chip.shared_memory - KIBI) // (4 * padded(paged_cache.value_size(record)))
    return min(most, 1 << (held.bit_length() - 1))
