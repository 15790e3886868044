"""A dense latent cache as a paged one with consecutive pages."""

import dataclasses

import jax
import jax.numpy as jnp

from ejkernel.families.paged_attention import PagedAttention, latent_pages
from ejkernel.families.tiled_attention import TiledAttention
from ejkernel_pallas.tpu.mosaic.paged_layout import stores_tokens_along_lanes
from ejkernel_pallas.tpu.mosaic.vectors import LANES

CANDIDATE_PAGE_SLOTS = (512, 256, 128)
"""Slots per page; a row of the cache must be whole pages, and larger pages take fewer copies."""


def paged_record_of_dense_cache(record: TiledAttention) -> PagedAttention:
    """Returns the paged record. The first columns of a row of keys are its value: all of them, if there is one cache.

    Pages are views of the caches. Caches whose length is not a multiple of 128 are padded, which copies them.

    Two caches are concatenated as keys. Rotary columns that are sliced off again are the rotary cache itself, which XLA
    does not copy. The kernel reads both if latent vectors are rows and rotary parts columns, the layouts that XLA gives
    512 and 64.
    """
    pages, _ = latent_pages.as_paged_record(record)
    keys, size = record.key[:, :, 0], record.value.shape[-1]
    rotary = keys.shape[-1] - size
    batch, length = keys.shape[:2]
    length += -length % CANDIDATE_PAGE_SLOTS[-1]
    slots = next(n for n in CANDIDATE_PAGE_SLOTS if length % n == 0)
    entries = length // slots

    def cache_to_pages(cache: jax.Array) -> jax.Array:
        cache = jnp.pad(cache, ((0, 0), (0, length - cache.shape[1]), (0, 0)))
        return cache.reshape(batch * entries, 1, slots, cache.shape[-1])

    separate = rotary > 0 and size % LANES == 0 and stores_tokens_along_lanes(rotary)
    return dataclasses.replace(
        pages,
        key_pages=cache_to_pages(record.value[:, :, 0] if separate else keys),
        value_pages=cache_to_pages(keys[..., size:]) if separate else None,
        kv_layout="phsd",
        block_tables=jnp.arange(batch * entries, dtype=jnp.int32).reshape(batch, entries),
        latent=(size, size),
    )


def paged_record_shapes(record: TiledAttention) -> PagedAttention:
    """Returns the paged record with shapes and dtypes only."""
    return jax.eval_shape(paged_record_of_dense_cache, record)
