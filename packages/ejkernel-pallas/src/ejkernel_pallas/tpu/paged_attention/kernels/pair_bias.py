"""The bias for pairs of new tokens, such as the mask of a tree of draft tokens: its copies, and its rows for products.

HBM   pair_bias [tokens, 1, columns]    a row per query token; the column of a key is its index among new tokens
  │   copy_pair_bias, with the pages of a key block that has new tokens
  ▼
VMEM  pair_bias_buffer[slot]            the columns of the block's keys, from a multiple of 128 on
  │   store_row_bias, once per product of all heads: rotated lanes, a row for each query head
  ▼
VMEM  row_bias [chunks, rows, keys]     added to the scores
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ejkernel.arithmetic import cdiv
from ejkernel_pallas.tpu.mosaic.division import divide
from ejkernel_pallas.tpu.mosaic.loops import fori_loop
from ejkernel_pallas.tpu.mosaic.vectors import LANES, SUBLANES
from ejkernel_pallas.tpu.paged_attention.kernels.copies import KeyBlock, WorkItem
from ejkernel_pallas.tpu.paged_attention.kernels.load_keys import KeyChunk
from ejkernel_pallas.tpu.paged_attention.kernels.refs import PagedRefs
from ejkernel_pallas.tpu.paged_attention.spec import PagedSpec

MAX_BIAS_TOKENS_PER_COPY = 8
"""The largest number of tokens whose bias is copied together."""


def bias_tokens_per_copy(spec: PagedSpec) -> int:
    """Returns the number of tokens whose bias is copied together."""
    return min(MAX_BIAS_TOKENS_PER_COPY, spec.tokens_per_tile)


def keys_have_pair_bias(refs: PagedRefs, item: WorkItem, first_key: Any, num_keys: int, spec: PagedSpec) -> Any:
    """Returns whether some of the `num_keys` keys from `first_key` on have a column in the bias for pairs."""
    column = first_key - refs.context_lengths[item.sequence]
    return (column < spec.pair_bias_columns) & (column + num_keys > 0) & (first_key < item.end_key)


def _lane_shift(refs: PagedRefs, item: WorkItem) -> Any:
    """Returns how many lanes after a multiple of 128 the column of the first key of each lane group is."""
    # A bitwise and is a remainder that is not negative; keys of lane groups begin at multiples of 128.
    return -refs.context_lengths[item.sequence] & (LANES - 1)


def copy_pair_bias(refs: PagedRefs, block: KeyBlock, spec: PagedSpec, *, wait: bool) -> None:
    """Starts the copy of the bias between an item's queries and the keys of a block, or waits for it, if the block has
    such keys.
    """
    item, first_key = block.item, block.index_in_sequence * spec.block_kv
    size = bias_tokens_per_copy(spec)

    @pl.when(keys_have_pair_bias(refs, item, first_key, spec.block_kv, spec))
    def _() -> None:
        column = first_key - refs.context_lengths[item.sequence] - _lane_shift(refs, item)
        # `block_kv` zeros come before the first column.
        lanes = pl.ds(pl.multiple_of(column + spec.block_kv, LANES), spec.block_kv + LANES)
        first_token = divide(item.first_row, spec.group_size)

        def copy_token_group(k: jax.Array, carry: jax.Array) -> jax.Array:
            copy = pltpu.make_async_copy(
                refs.pair_bias.at[pl.ds(first_token + k * size, size), :, lanes],
                refs.pair_bias_buffer.at[block.buffer_slot, pl.ds(k * size, size)],
                refs.pair_bias_arrived.at[block.buffer_slot],
            )
            copy.wait() if wait else copy.start()
            return carry

        fori_loop(jnp.int32(0), divide(item.num_tokens + size - 1, size), copy_token_group, jnp.int32(0))


def store_row_bias(refs: PagedRefs, item: WorkItem, at: KeyChunk, n: int, spec: PagedSpec) -> None:
    """Stores the bias of each row and key of the n-th chunk: that of the row's token, with its columns moved to the
    lanes of their keys.

    The columns of a lane group's keys begin anywhere in a lane group of the bias, so one more is loaded and rotated.
    """
    size, rows = at.num_keys + LANES, 1 if spec.tokens_per_tile == 1 else math.lcm(spec.group_size, SUBLANES)
    shift = _lane_shift(refs, item)
    shift = jnp.where(shift == 0, 0, size - shift)
    lanes, tokens = pl.ds(pl.multiple_of(at.start_in_buffer, LANES), size), cdiv(rows, spec.group_size)
    row = lax.broadcasted_iota(jnp.int32, (rows, at.num_keys), 0)

    def store_token_group_bias(k: Any, carry: Any) -> Any:
        bias = jnp.zeros((rows, at.num_keys), jnp.float32)
        for t in range(tokens):  # a store begins at a row that is a multiple of 8, so it has the rows of whole tokens
            columns = refs.pair_bias_buffer[at.buffer_slot, k * tokens + t, :, lanes]
            columns = jnp.broadcast_to(pltpu.roll(columns, shift, 1)[:, : at.num_keys], bias.shape)
            bias = jnp.where(row >= t * spec.group_size, columns, bias) if t else columns
        refs.row_bias[n, pl.ds(pl.multiple_of(k * rows, rows), rows), : at.num_keys] = bias
        return carry

    count = 1 if spec.tokens_per_tile == 1 else divide(item.num_tokens + tokens - 1, tokens)
    fori_loop(jnp.int32(0), count, store_token_group_bias, jnp.int32(0))
