"""Tiles of the keys of one batch row, read from rows or from pages where they are."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ejkernel.arithmetic import cdiv
from ejkernel.families.lightning_indexer import LightningIndexer, num_keys, take_keys
from ejkernel.planning.page_slots import slots_of_tokens


class RowKeys(NamedTuple):
    """The keys of one batch row.

    Attributes:
        keys: [S, D], with padding after the last key up to a whole tile; over pages the slots of all pages.
        scales: [S], of the keys; None for none.
        table: [1, N], the pages of the row; None where keys are the row's own.
        padded_count: Keys, those that fill up the last tile among them.
    """

    keys: jax.Array
    scales: jax.Array | None
    table: jax.Array | None
    padded_count: int


class KeyTile(NamedTuple):
    """Some successive keys of one batch row.

    Attributes:
        keys: [k, D].
        scales: [k]; None for none.
        is_present: [k], whether a key is on a page; None where all are.
    """

    keys: jax.Array
    scales: jax.Array | None
    is_present: jax.Array | None


def row_keys(
    key: jax.Array, scales: jax.Array | None, table: jax.Array | None, record: LightningIndexer, block_k: int
) -> RowKeys:
    """Returns the keys of a row, from its own [S, D], or from the slots of all pages [P S, D] and its table [N]."""
    padded_count = cdiv(num_keys(record), block_k) * block_k
    if table is None:
        padding = (0, padded_count - key.shape[0])
        key, scales = jnp.pad(key, (padding, (0, 0))), None if scales is None else jnp.pad(scales, padding)
    return RowKeys(key, scales, None if table is None else table[None], padded_count)


def load_tile(row: RowKeys, record: LightningIndexer, start: jax.Array, block_k: int) -> KeyTile:
    """Returns the keys from `start` on."""
    if row.table is None:
        scales = None if row.scales is None else lax.dynamic_slice_in_dim(row.scales, start, block_k)
        return KeyTile(lax.dynamic_slice_in_dim(row.keys, start, block_k), scales, None)
    pages, size, _ = record.key.shape
    token = start + jnp.arange(block_k, dtype=jnp.int32)
    slots = slots_of_tokens(token, jnp.int32(0), row.table, (pages, size))
    return KeyTile(take_keys(row.keys, slots), take_scales(row.scales, slots), slots >= 0)


def take_scales(scales: jax.Array | None, indices: jax.Array) -> jax.Array | None:
    """Returns the scales at some indices; None for none."""
    return None if scales is None else scales[jnp.maximum(indices, 0)]
