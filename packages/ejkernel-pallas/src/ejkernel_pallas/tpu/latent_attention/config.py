"""Tile sizes: those of paged attention, for the paged record of a dense latent cache."""

import dataclasses
from typing import Any

from ejkernel.families.tiled_attention import TiledAttention
from ejkernel.ops.params import Direction
from ejkernel_pallas.tpu.latent_attention.plan import paged_record_shapes
from ejkernel_pallas.tpu.paged_attention import config as paged_config
from ejkernel_pallas.tpu.paged_attention.config import PUBLIC_FIELDS, TpuPaged

__all__ = ["PUBLIC_FIELDS", "TpuPaged", "batch_invariant", "candidates", "heuristic"]

INVARIANT_PRODUCT_KEYS, MAX_INVARIANT_BLOCK_KEYS = 512, 2048
"""Keys per product in a `batch_invariant` block, a multiple of the slots of all pages; and the most keys per step."""


def heuristic(record: TiledAttention, device: Any, direction: Direction) -> TpuPaged:
    """Returns tile sizes for a record on a device."""
    return paged_config.heuristic(paged_record_shapes(record), device, direction)


def batch_invariant(record: TiledAttention, device: Any, direction: Direction) -> TpuPaged:
    """Returns the tile sizes of a call in a `batch_invariant` block.

    A call of `mla_decode` has one query per row, so all calls have the products of decoding. Which keys are in one
    product, and which products in one step, must not follow from the length of the caches.
    """
    pages = paged_record_shapes(record)
    keys = min(MAX_INVARIANT_BLOCK_KEYS, paged_config.block_keys_in_vmem(pages))
    return dataclasses.replace(
        paged_config.heuristic(pages, device, direction),
        block_kv=max(INVARIANT_PRODUCT_KEYS, keys),
        product_keys=INVARIANT_PRODUCT_KEYS,
    )


def candidates(record: TiledAttention, device: Any, direction: Direction) -> tuple[TpuPaged, ...]:
    """Returns tile sizes worth measuring for a record on a device."""
    return paged_config.candidates(paged_record_shapes(record), device, direction)
