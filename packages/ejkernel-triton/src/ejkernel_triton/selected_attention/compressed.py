"""The branches that are tiled attention, by whatever implementation of it serves them best.

The compressed branch has one key a block. They are so few that a backward kernel with a program for every tile of keys
leaves most of a GPU idle. So its queries are split, and the splits count as rows of the batch with the same keys:

    query [B, T]  -->  [B splits, T / splits]      dkey = sum over splits of each split's dkey, in float32
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.families.selected_attention.branches import DenseKernel
from ejkernel.families.tiled_attention import SoftmaxResiduals, TiledAttention
from ejkernel.ops.device import current_device
from ejkernel.ops.nested import DISPATCHED
from ejkernel.types.pullback import Pullback
from ejkernel_triton.chips import chip_of

BLOCK_KV = 64
"""Keys that a program of a backward kernel accumulates gradients for."""
PROGRAMS_PER_SM = 2
"""Programs that a multiprocessor's registers hold at once."""
MIN_QUERIES = 256
"""Fewest queries of a split."""


def backward(pullback: Pullback) -> dict[str, jax.Array]:
    """Gradients of query, key and value of a branch, as far as they are wanted."""
    record: TiledAttention = pullback.record
    splits = query_splits(record)
    if splits == 1:
        return DISPATCHED.backward(pullback)
    found = DISPATCHED.backward(_split_queries(pullback, splits))
    batch, tokens = record.query.shape[:2]
    made: dict[str, jax.Array] = {}
    for name, gradient in found.items():
        if name == "query":
            made[name] = gradient.reshape(batch, -1, *gradient.shape[2:])[:, :tokens]
        else:
            summed = jnp.sum(gradient.reshape(batch, splits, *gradient.shape[1:]), axis=1, dtype=jnp.float32)
            made[name] = summed.astype(gradient.dtype)
    return made


DENSE = DenseKernel(DISPATCHED.forward, backward)
"""The branches that are tiled attention."""


def query_splits(record: TiledAttention) -> int:
    """How many splits the queries of a branch are cut into."""
    if record.kv_positions is None:  # the window: its keys are as many as its queries
        return 1
    # As many splits as fill the chip. With 8192 queries and 128 keys the backward pass took 4.78 ms in one call, 0.93
    # in 17 splits and 0.58 in 32 (docs/lab/native_sparse_attention_gpu.md).
    batch, keys, heads, _ = record.key.shape
    programs = PROGRAMS_PER_SM * chip_of(current_device()).multiprocessors
    key_programs = batch * heads * -(-keys // BLOCK_KV)
    return max(1, min(-(-programs // key_programs), record.query.shape[1] // MIN_QUERIES))


def _split_queries(pullback: Pullback, splits: int) -> Pullback:
    """The same backward pass with splits of the queries as rows of the batch."""
    record: TiledAttention = pullback.record
    batch, tokens = record.query.shape[:2]
    length = -(-tokens // splits)
    missing = splits * length - tokens

    def split(x: Any, value: Any = 0) -> Any:
        if x is None:
            return None
        x = jnp.broadcast_to(x, (batch, *x.shape[1:]))
        x = jnp.pad(x, ((0, 0), (0, missing), *((0, 0),) * (x.ndim - 2)), constant_values=value)
        return x.reshape(batch * splits, length, *x.shape[2:])

    def repeated(x: Any) -> Any:
        return x if x is None or x.shape[0] == 1 < batch else jnp.repeat(x, splits, axis=0)

    # Padding of the last split has position -1, before all keys, and segment -1: it attends to nothing.
    split_record = dataclasses.replace(
        record,
        query=split(record.query),
        key=repeated(record.key),
        value=repeated(record.value),
        q_segment_ids=split(record.q_segment_ids, -1),
        kv_segment_ids=repeated(record.kv_segment_ids),
        q_positions=split(record.q_positions, -1),
        kv_positions=repeated(record.kv_positions),
    )
    lse = split(pullback.residuals.lse.swapaxes(1, 2), -jnp.inf).swapaxes(1, 2)
    return dataclasses.replace(
        pullback,
        record=split_record,
        residuals=SoftmaxResiduals(lse=lse),
        output=split(pullback.output),
        cotangent=split(pullback.cotangent),
    )
