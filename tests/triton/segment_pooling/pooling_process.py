"""Segment pooling in Triton's interpreter, ranges of all kinds, against the family's reference and its gradient."""

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.families.segment_pooling import SegmentPooling, reference
from ejkernel.types.pullback import Pullback
from ejkernel_triton.segment_pooling.backward import backward
from ejkernel_triton.segment_pooling.config import PoolingBackward, PoolingForward
from ejkernel_triton.segment_pooling.forward import forward

# Blocks of 8: empty pools at both ends and at bounds of blocks, one token, whole blocks, over four, gaps.
RANGES = ((0, 0), (0, 3), (4, 4), (5, 8), (8, 8), (8, 16), (16, 24), (24, 24), (26, 55), (55, 56), (57, 66), (67, 67))
TOKENS, CHANNELS = 67, 10


def check(record: SegmentPooling) -> None:
    """Compares both passes; tokens of no pool are NaN."""
    want, pull = jax.vjp(
        lambda values: reference(SegmentPooling(**{**fields(record), "values": values}))[0], record.values
    )
    made, residuals = forward(
        record, PoolingForward(tokens_per_block=8, block_t=4, block_c=16, num_warps=1, prefetch=record.lengths is None)
    )
    np.testing.assert_allclose(made, want, rtol=2e-6, atol=2e-6)
    cotangent = jax.random.normal(jax.random.key(1), want.shape)
    saved = Pullback(
        record=record, residuals=residuals, output=made, cotangent=cotangent, grad_fields=frozenset({"values"})
    )
    found = backward(saved, PoolingBackward(block_t=4, block_c=16, tiles_per_program=2, num_warps=1))["values"]
    np.testing.assert_allclose(found, pull(cotangent)[0], rtol=2e-6, atol=2e-6)


def fields(record: SegmentPooling) -> dict[str, object]:
    """By name."""
    return {name: getattr(record, name) for name in ("chunk_size", "lengths", "ranges")}


values = jax.random.normal(jax.random.key(0), (1, TOKENS, 2, CHANNELS // 2))
token = np.arange(TOKENS)
owned = np.any([(token >= first) & (token < end) for first, end in RANGES], axis=0)
poisoned = jnp.where(owned[None, :, None, None], values, jnp.nan)
check(SegmentPooling(values=poisoned, chunk_size=TOKENS, ranges=jnp.array(RANGES, jnp.int32)))
check(SegmentPooling(values=values, chunk_size=TOKENS, ranges=jnp.array([[3, 60]], jnp.int32)))
rows = jnp.concatenate([values, values + 1])
# Pools of 4 tokens cross no block: there is one kernel, which also stores the pools after a row's end.
for size in (3, 4, 20):
    check(SegmentPooling(values=rows, chunk_size=size, lengths=jnp.array([0, 50], jnp.int32)))
