"""`mla_decode` on the paged kernel: a dense cache of latent vectors is one whose pages follow each other.

The operation lowers to tiled attention, whose gradients it has; this forward pass leaves the residuals of that family,
so that any backward pass of it serves.
"""

import dataclasses
from collections.abc import Generator
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.families.paged_attention import PagedAttention, latent_pages
from ejkernel.families.tiled_attention import SoftmaxResiduals, TiledAttention
from ejkernel.ops.params import Direction
from ejkernel_pallas.tpu.mosaic.vectors import LANES
from ejkernel_pallas.tpu.paged_attention import limits, tiles
from ejkernel_pallas.tpu.paged_attention.forward import forward as paged_forward
from ejkernel_pallas.tpu.paged_attention.spec import along_lanes
from ejkernel_pallas.tpu.paged_attention.tiles import TpuPaged

SLOTS = (512, 256, 128)
"""Slots of a page, of which a row of the cache is to have whole ones: fewer copies with larger pages."""


def forward(record: TiledAttention, config: TpuPaged) -> tuple[jax.Array, SoftmaxResiduals]:
    """Output [B, 1, H, Dv] and residuals of a record that `mla_decode` made."""
    (output, lse), _ = paged_forward(as_pages(record), config)
    return output[:, None], SoftmaxResiduals(lse=lse[:, :, None])


def heuristic(record: TiledAttention, device: Any, direction: Direction) -> TpuPaged:
    """Tile sizes for a record on a device."""
    return tiles.heuristic(_shapes(record), device, direction)


def candidates(record: TiledAttention, device: Any, direction: Direction) -> tuple[TpuPaged, ...]:
    """Tile sizes worth measuring for a record on a device."""
    return tiles.candidates(_shapes(record), device, direction)


def reasons(record: TiledAttention) -> Generator[str]:
    """Why a record cannot be served; nothing if it can."""
    if not (record.query.size and record.key.size):
        yield "an array is empty"
        return
    yield from limits.reasons(_shapes(record))


def as_pages(record: TiledAttention) -> PagedAttention:
    """The paged record. The first columns of a row of keys are its value: all of them, where there is one cache.

    Pages are parts of the caches as they lie. Caches whose length is no multiple of 128 are padded, which copies them.

    Two caches come joined as keys. Rotary columns that are sliced off again are the rotary cache itself, of which XLA
    makes no copy. The kernel has both where latent vectors are rows and rotary parts columns, as XLA keeps 512 and 64.
    """
    pages, _ = latent_pages.as_pages(record)
    keys, size = record.key[:, :, 0], record.value.shape[-1]
    rotary = keys.shape[-1] - size
    batch, length = keys.shape[:2]
    length += -length % SLOTS[-1]
    slots = next(n for n in SLOTS if length % n == 0)
    entries = length // slots

    def cut(cache: jax.Array) -> jax.Array:
        cache = jnp.pad(cache, ((0, 0), (0, length - cache.shape[1]), (0, 0)))
        return cache.reshape(batch * entries, 1, slots, cache.shape[-1])

    separate = rotary > 0 and size % LANES == 0 and along_lanes(rotary)
    return dataclasses.replace(
        pages,
        key_pages=cut(record.value[:, :, 0] if separate else keys),
        value_pages=cut(keys[..., size:]) if separate else None,
        kv_layout="phsd",
        block_tables=jnp.arange(batch * entries, dtype=jnp.int32).reshape(batch, entries),
        latent=(size, size),
    )


def _shapes(record: TiledAttention) -> PagedAttention:
    return jax.eval_shape(as_pages, record)
