"""Plans the backward pass: the queries that list each block, and the splits of the compressed branch's queries.

Lists are inverted, from the blocks that a query lists to the queries that list a block:

    block_indices [T, N]  --sort by (block, query)-->  readers [T N]   | block 0 ........ | block 1 .. | ...
                                                       splits          | L | L | L | rest |     one    |

The sort is of one unsigned integer per slot. Nothing is recompiled when lists change: there is room for one split per
block, and one for every `max_queries_per_split` slots.

The compressed branch has one key per block. There are so few that a backward kernel with a program per tile of keys
leaves most of a GPU idle. So its queries are split, and the splits are more batch rows with the same keys:

    query [B, T]  -->  [B splits, T / splits]      dkey = sum over splits of each split's dkey, in float32
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ejkernel.arithmetic import cdiv
from ejkernel.families.selected_attention import SelectedAttention, num_listable_blocks, starts
from ejkernel.families.selected_attention.branches import DenseKernel
from ejkernel.families.tiled_attention import SoftmaxResiduals, TiledAttention
from ejkernel.ops.chips import gpu_of
from ejkernel.ops.device import current_device
from ejkernel.ops.nested import dispatched_backward, dispatched_forward
from ejkernel.types.pullback import Pullback

UINT32_RANGE = 2**32


class QueryLists(NamedTuple):
    """The queries of each block's list. E slots, C splits, M blocks.

    Attributes:
        tokens: [B, Hk, E] int32, queries, block by block, in ascending order within a block.
        list_splits: [B, Hk, C, 4] int32, the splits: block, first entry, end of the entries, and slot of the sums;
            block -1 for unused ones, slot -1 if the block has a single split.
        sum_slots: [B, Hk, M, 2] int32, first slot of a block's sums and their number, 0 if it has a single split.
        num_sum_slots: Slots for sums, per batch row and KV head.
    """

    tokens: jax.Array
    list_splits: jax.Array
    sum_slots: jax.Array
    num_sum_slots: int


BACKWARD_BLOCK_KV = 64
"""Keys that a program of a backward kernel accumulates gradients for."""
RESIDENT_PROGRAMS_PER_SM = 2
"""Programs per multiprocessor that registers allow."""
MIN_QUERIES_PER_SPLIT = 256
"""The smallest number of queries per split."""
DENSE_OPERATION = "flash_attention"
"""The operation that computes the branches that are tiled attention."""


def invert_block_lists(record: SelectedAttention, max_queries_per_split: int) -> QueryLists:
    """Returns the lists of a record, in splits of at most `max_queries_per_split` queries."""
    block_indices, num_blocks = record.block_indices, num_listable_blocks(record)
    assert block_indices is not None  # selected before
    if record.q_segment_ids is not None:
        block_indices = jnp.where((record.q_segment_ids >= 0)[..., None, None], block_indices, -1)
    tokens, bounds = _sort_queries_by_block(block_indices, num_blocks)
    entries = tokens.shape[2]
    list_lengths = jnp.diff(bounds)
    # A block that no query lists has one empty split, whose program stores its zeros.
    split_counts = jnp.maximum(cdiv(list_lengths, max_queries_per_split), 1)
    split_ends = jnp.cumsum(split_counts, axis=-1)
    split_starts = split_ends - split_counts
    max_splits = num_blocks + entries // max_queries_per_split
    split_index = jnp.arange(max_splits, dtype=jnp.int32)
    # Counts the blocks all of whose splits come before.
    block = jnp.sum(split_ends[:, :, None, :] <= split_index[:, None], axis=-1, dtype=jnp.int32)
    is_used = block < num_blocks
    block = jnp.minimum(block, num_blocks - 1)

    def take_at_block(x: jax.Array) -> jax.Array:
        return jnp.take_along_axis(x, block, axis=-1)

    sum_slot_counts = jnp.where(split_counts > 1, split_counts, 0)
    first_slot = jnp.cumsum(sum_slot_counts, axis=-1) - sum_slot_counts
    index_in_block = split_index - take_at_block(split_starts)
    first_entry = take_at_block(bounds[..., :-1]) + index_in_block * max_queries_per_split
    list_splits = (
        jnp.where(is_used, block, -1),
        first_entry,
        jnp.minimum(first_entry + max_queries_per_split, take_at_block(bounds[..., 1:])),
        jnp.where(take_at_block(sum_slot_counts) > 0, take_at_block(first_slot) + index_in_block, -1),
    )
    # A list that is split has more than `max_queries_per_split` entries, and at most twice as many splits as full ones.
    return QueryLists(
        tokens=tokens,
        list_splits=jnp.stack(list_splits, axis=-1).astype(jnp.int32),
        sum_slots=jnp.stack((first_slot, sum_slot_counts), axis=-1).astype(jnp.int32),
        num_sum_slots=max(1, 2 * (entries // max_queries_per_split)),
    )


def block_ends(record: SelectedAttention) -> jax.Array:
    """Returns the end of each block, [1, M] int32: a sequence's last block ends where the next block starts."""
    block_starts, keys = starts(record), record.key.shape[1]
    next_starts = jnp.concatenate([block_starts[1:], jnp.full(1, keys, block_starts.dtype)])
    return jnp.minimum(block_starts + record.block_size, next_starts).astype(jnp.int32)[None]


def _sort_queries_by_block(block_indices: jax.Array, num_blocks: int) -> tuple[jax.Array, jax.Array]:
    """Returns queries by block, [B, Hk, T N], and each block's start, [B, Hk, count + 1]; empty slots come last."""
    batch, length, heads, list_length = block_indices.shape
    entries = length * list_length
    token = jnp.arange(length, dtype=jnp.uint32)[:, None]
    block = (
        jnp.where(block_indices >= 0, block_indices, num_blocks)
        .swapaxes(1, 2)
        .reshape(batch * heads, length, list_length)
    )
    block_ids = jnp.arange(num_blocks + 1, dtype=jnp.uint32)
    if batch * heads * (num_blocks + 1) * length < UINT32_RANGE:
        # One sort of all rows: XLA uses a radix sort for long sorts along a single axis.
        row = jnp.arange(batch * heads, dtype=jnp.uint32)[:, None] * (num_blocks + 1)
        pairs = (row[..., None] + block.astype(jnp.uint32)) * length + token
        sorted_pairs = jnp.sort(pairs.reshape(-1))
        row_block_bounds = ((row + block_ids) * length).reshape(-1)
        bounds = jnp.searchsorted(sorted_pairs, row_block_bounds, method="scan_unrolled").reshape(
            batch, heads, num_blocks + 1
        )
        # Converts entries of all rows to entries of each row.
        bounds = bounds - jnp.arange(batch * heads, dtype=bounds.dtype).reshape(batch, heads, 1) * entries
        return (sorted_pairs % length).astype(jnp.int32).reshape(batch, heads, entries), bounds.astype(jnp.int32)
    sorted_blocks, tokens = jax.lax.sort(
        (block.reshape(-1, entries).astype(jnp.int32), jnp.broadcast_to(token, block.shape).reshape(-1, entries)),
        num_keys=1,
    )
    bounds = jax.vmap(lambda x: jnp.searchsorted(x, block_ids.astype(jnp.int32), method="scan_unrolled"))(sorted_blocks)
    tokens = tokens.astype(jnp.int32).reshape(batch, heads, entries)
    return tokens, bounds.reshape(batch, heads, num_blocks + 1).astype(jnp.int32)


def backward_with_query_splits(pullback: Pullback) -> dict[str, jax.Array]:
    """Returns the requested gradients of query, key and value of a branch."""
    record: TiledAttention = pullback.record
    splits = query_splits(record)
    if splits == 1:
        return dispatched_backward(DENSE_OPERATION, pullback)
    split_gradients = dispatched_backward(DENSE_OPERATION, _split_queries(pullback, splits))
    batch, tokens = record.query.shape[:2]
    gradients: dict[str, jax.Array] = {}
    for name, gradient in split_gradients.items():
        if name == "query":
            gradients[name] = gradient.reshape(batch, -1, *gradient.shape[2:])[:, :tokens]
        else:
            summed = jnp.sum(gradient.reshape(batch, splits, *gradient.shape[1:]), axis=1, dtype=jnp.float32)
            gradients[name] = summed.astype(gradient.dtype)
    return gradients


DENSE_KERNEL = DenseKernel(functools.partial(dispatched_forward, DENSE_OPERATION), backward_with_query_splits)
"""The kernels of the dense branches, which are tiled attention."""


def query_splits(record: TiledAttention) -> int:
    """Returns the number of splits of the queries of a branch."""
    if record.kv_positions is None:  # the window branch: its keys are as many as its queries
        return 1
    # As many splits as fill the chip. With 8192 queries and 128 keys the backward pass took 4.78 ms in one call, 0.93
    # in 17 splits and 0.58 in 32 (docs/lab/native_sparse_attention_gpu.md).
    batch, keys, heads, _ = record.key.shape
    programs = RESIDENT_PROGRAMS_PER_SM * gpu_of(current_device()).multiprocessors
    key_programs = batch * heads * cdiv(keys, BACKWARD_BLOCK_KV)
    return max(1, min(cdiv(programs, key_programs), record.query.shape[1] // MIN_QUERIES_PER_SPLIT))


def _split_queries(pullback: Pullback, splits: int) -> Pullback:
    """Returns the same backward pass with splits of the queries as batch rows."""
    record: TiledAttention = pullback.record
    batch, tokens = record.query.shape[:2]
    length = cdiv(tokens, splits)
    num_padding = splits * length - tokens

    def split_into_batch_rows(x: Any, value: Any = 0) -> Any:
        if x is None:
            return None
        x = jnp.broadcast_to(x, (batch, *x.shape[1:]))
        x = jnp.pad(x, ((0, 0), (0, num_padding), *((0, 0),) * (x.ndim - 2)), constant_values=value)
        return x.reshape(batch * splits, length, *x.shape[2:])

    def repeat_for_splits(x: Any) -> Any:
        return x if x is None or x.shape[0] == 1 < batch else jnp.repeat(x, splits, axis=0)

    # Padding of the last split has position -1, before all keys, and segment -1: it attends to nothing.
    split_record = dataclasses.replace(
        record,
        query=split_into_batch_rows(record.query),
        key=repeat_for_splits(record.key),
        value=repeat_for_splits(record.value),
        q_segment_ids=split_into_batch_rows(record.q_segment_ids, -1),
        kv_segment_ids=repeat_for_splits(record.kv_segment_ids),
        q_positions=split_into_batch_rows(record.q_positions, -1),
        kv_positions=repeat_for_splits(record.kv_positions),
    )
    lse = split_into_batch_rows(pullback.residuals.lse.swapaxes(1, 2), -jnp.inf).swapaxes(1, 2)
    return dataclasses.replace(
        pullback,
        record=split_record,
        residuals=SoftmaxResiduals(lse=lse),
        output=split_into_batch_rows(pullback.output),
        cotangent=split_into_batch_rows(pullback.cotangent),
    )
