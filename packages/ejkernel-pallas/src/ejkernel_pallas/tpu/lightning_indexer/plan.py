"""The arrays that the kernel reads: queries by block and head, and the tiles of keys of each block of queries."""

import jax
import jax.numpy as jnp

from ejkernel.arithmetic import cdiv
from ejkernel.families.lightning_indexer import LightningIndexer
from ejkernel_pallas.tpu.lightning_indexer.config import BLOCK_Q
from ejkernel_pallas.tpu.lightning_indexer.spec import IndexerSpec


def split_into_query_blocks(array: jax.Array, spec: IndexerSpec) -> jax.Array:
    """Splits [B, T, ...] into blocks of queries, [B, blocks, 128, ...], with 0 after the last query."""
    padding = spec.num_query_blocks * BLOCK_Q - array.shape[1]
    padded = jnp.pad(array, [(0, 0), (0, padding)] + [(0, 0)] * (array.ndim - 2))
    return padded.reshape(array.shape[0], spec.num_query_blocks, BLOCK_Q, *array.shape[2:])


def rows_of_heads(record: LightningIndexer, spec: IndexerSpec) -> jax.Array:
    """Returns the queries, those of a block head by head: [B, blocks, H 128, D]. A negative scale turns their signs."""
    query = -record.query if record.softmax_scale < 0 else record.query
    blocks = jnp.swapaxes(split_into_query_blocks(query, spec), 2, 3)
    return blocks.reshape(*blocks.shape[:2], -1, blocks.shape[-1])


def weights_of_heads(record: LightningIndexer, spec: IndexerSpec) -> jax.Array:
    """Returns the weights times the magnitude of the scale, [B, blocks, H, 128] float32."""
    weights = record.weights.astype(jnp.float32) * abs(record.softmax_scale)
    return jnp.swapaxes(split_into_query_blocks(weights, spec), 2, 3)


def key_bounds(record: LightningIndexer, spec: IndexerSpec) -> tuple[jax.Array, jax.Array]:
    """Returns the first key that each query may select and the key after the last one, [B, blocks, 1, 128] int32."""
    shape = record.query.shape[:2]
    starts, ends = (
        split_into_query_blocks(jnp.broadcast_to(x, shape), spec) for x in (record.key_starts, record.key_ends)
    )
    return starts[:, :, None], ends[:, :, None]


def key_tile_bounds(bounds: tuple[jax.Array, jax.Array], spec: IndexerSpec) -> tuple[jax.Array, jax.Array]:
    """Returns the first tile of keys that a block of queries needs, and the tile after the last one, [B blocks] int32;
    the same number twice for a block that selects nothing.
    """
    starts, ends = bounds
    has_keys = starts < ends
    first = jnp.min(jnp.where(has_keys, starts, spec.num_key_tiles * spec.block_k), axis=(2, 3)) // spec.block_k
    end = cdiv(jnp.max(jnp.where(has_keys, ends, 0), axis=(2, 3)), spec.block_k)
    first = jnp.minimum(first, spec.num_key_tiles - 1)
    return first.reshape(-1), jnp.maximum(first, end).reshape(-1)
