"""Keys of packed sequences laid out so that every sequence starts at a block: blocks are then those of one row.

keys    | a a a a a | b b b | c c c c |
blocks  | a a a a | a . . . | b b b . | c c c c |     of 4 keys, padded after the end of each sequence
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from ejkernel.arithmetic import cdiv
from ejkernel.families.lightning_indexer import take_keys
from ejkernel.families.segment_pooling import chunk_ranges
from ejkernel.modules.operations.shared.key_ranges import find_sequences_of_queries


class PackedKeyBlocks(NamedTuple):
    """The layout of a row of packed keys. M blocks of n keys, T queries.

    Attributes:
        keys: [M * n] int32, the index in the row of each key; -1 for padding.
        first_blocks: [1, T] int32, the first block of each query's sequence.
        offsets: [1, T] int32, index of a key in the layout minus its index in the row, for each query's sequence.
    """

    keys: jax.Array
    first_blocks: jax.Array
    offsets: jax.Array

    def lay_out(self, x: jax.Array) -> jax.Array:
        """Returns arrays of the row's keys, [1, S, ...], in the order of blocks, 0 where there is no key."""
        return take_keys(x[0].reshape(x.shape[1], -1), self.keys).reshape(1, -1, *x.shape[2:])


def lay_out_packed_keys(
    size: int, sizes: tuple[int, int, int], cum_seqlens: tuple[jax.Array, jax.Array]
) -> PackedKeyBlocks:
    """Returns the layout of packed keys in blocks of `size`, which start at each sequence's first key.

    Args:
        size: Keys per block.
        sizes: 1, queries and keys.
        cum_seqlens: Cumulative lengths of queries and keys, [N + 1] each.
    """
    keys = sizes[2]
    bounds = jnp.clip(cum_seqlens[1].astype(jnp.int32), 0, keys)
    blocks = cdiv(jnp.diff(bounds), size)
    sequences = find_sequences_of_queries(sizes, cum_seqlens)
    first_blocks = (jnp.cumsum(blocks, dtype=jnp.int32) - blocks)[jnp.maximum(sequences.ids, 0)]
    ranges = chunk_ranges(bounds, size, keys)
    key = ranges[:, :1] + jnp.arange(size, dtype=jnp.int32)
    key = jnp.where(key < ranges[:, 1:], key, -1).reshape(-1)
    return PackedKeyBlocks(key, first_blocks, first_blocks * size - sequences.first_keys)
