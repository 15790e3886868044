"""The branches that are tiled attention, by whatever implementation of it serves them best.

The compressed branch has one key a block, and so few of them that the programs of a backward kernel which own keys
leave most of a GPU idle. Its queries are cut into parts that count as rows of the batch, with the same keys each:

    query [B, T]  -->  [B parts, T / parts]      d key = sum over parts of d key of the part, in float32
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.families.tiled_attention import SoftmaxResiduals, TiledAttention
from ejkernel.ops.device import current_device
from ejkernel.ops.pullback import Pullback
from ejkernel.planning.selected_branches import DISPATCHED, DenseKernel
from ejkernel_triton.chips import chip_of

KEYS = 64
"""Keys that a program of a backward kernel owns."""
PROGRAMS_PER_SM = 2
"""As many as registers have room for."""
QUERIES = 256
"""Of a part, at least."""


def backward(pullback: Pullback) -> dict[str, jax.Array]:
    """Gradients of query, key and value of a branch, as far as they are wanted."""
    record: TiledAttention = pullback.record
    parts = parts_of(record)
    if parts == 1:
        return DISPATCHED.backward(pullback)
    found = DISPATCHED.backward(_cut(pullback, parts))
    batch, tokens = record.query.shape[:2]
    made: dict[str, jax.Array] = {}
    for name, gradient in found.items():
        if name == "query":
            made[name] = gradient.reshape(batch, -1, *gradient.shape[2:])[:, :tokens]
        else:
            summed = jnp.sum(gradient.reshape(batch, parts, *gradient.shape[1:]), axis=1, dtype=jnp.float32)
            made[name] = summed.astype(gradient.dtype)
    return made


DENSE = DenseKernel(DISPATCHED.forward, backward)
"""The branches that are tiled attention."""


def parts_of(record: TiledAttention) -> int:
    """How many parts the queries of a branch are cut into."""
    if record.kv_positions is None:  # the window: its keys are as many as its queries
        return 1
    batch, keys, heads, _ = record.key.shape
    programs = PROGRAMS_PER_SM * chip_of(current_device()).multiprocessors
    owners = batch * heads * -(-keys // KEYS)
    return max(1, min(-(-programs // owners), record.query.shape[1] // QUERIES))


def _cut(pullback: Pullback, parts: int) -> Pullback:
    """The same backward pass with parts of the queries as rows of the batch."""
    record: TiledAttention = pullback.record
    batch, tokens = record.query.shape[:2]
    length = -(-tokens // parts)
    missing = parts * length - tokens

    def cut(x: Any, value: Any = 0) -> Any:
        if x is None:
            return None
        x = jnp.broadcast_to(x, (batch, *x.shape[1:]))
        x = jnp.pad(x, ((0, 0), (0, missing), *((0, 0),) * (x.ndim - 2)), constant_values=value)
        return x.reshape(batch * parts, length, *x.shape[2:])

    def repeated(x: Any) -> Any:
        return x if x is None or x.shape[0] == 1 < batch else jnp.repeat(x, parts, axis=0)

    # What fills up the last part lies before all keys, and attends to none.
    own = dataclasses.replace(
        record,
        query=cut(record.query),
        key=repeated(record.key),
        value=repeated(record.value),
        q_segment_ids=cut(record.q_segment_ids, -1),
        kv_segment_ids=repeated(record.kv_segment_ids),
        q_positions=cut(record.q_positions, -1),
        kv_positions=repeated(record.kv_positions),
    )
    lse = cut(pullback.residuals.lse.swapaxes(1, 2), -jnp.inf).swapaxes(1, 2)
    return dataclasses.replace(
        pullback,
        record=own,
        residuals=SoftmaxResiduals(lse=lse),
        output=cut(pullback.output),
        cotangent=cut(pullback.cotangent),
    )
