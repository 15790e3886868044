"""Forward pass of ring attention: tiled attention to one device's keys after the other, merged as they come."""

import jax
import jax.numpy as jnp

from ejkernel import _compat
from ejkernel.families.ring_attention import RingAttention, as_tiled_attention
from ejkernel.families.ring_attention.schedule import (
    TravellingKeys,
    local_record,
    ring_of,
    step_record,
    travelling_keys_of,
)
from ejkernel.families.tiled_attention import SoftmaxResiduals
from ejkernel.planning.softmax_merge import PartialAttention, merge
from ejkernel_xla.tiled_attention import forward as tiles
from ejkernel_xla.tiled_attention.config import ChunkedSoftmax
from ejkernel_xla.tiled_attention.kernels.scores import accumulator


def forward(record: RingAttention, params: ChunkedSoftmax) -> tuple[jax.Array, SoftmaxResiduals]:
    """Returns attention output and residuals of one device's queries.

    Args:
        record: The canonical arguments.
        params: Tile sizes.

    Returns:
        Output [B, T, H, Dv] in the query's dtype, and the residuals for the backward pass.
    """
    ring = ring_of(record)
    if ring is None:
        return tiles.forward(as_tiled_attention(record), params)
    local, dtype = local_record(record, ring), accumulator(as_tiled_attention(record))

    def ring_step(
        source: jax.Array, travelling_keys: TravellingKeys, so_far: PartialAttention
    ) -> tuple[TravellingKeys, PartialAttention]:
        # In the accumulator's dtype: rounding would add up over the ring steps.
        output, residuals = tiles.attend(step_record(local, ring, source, travelling_keys), params, dtype)
        return {}, merge(so_far, PartialAttention(output, residuals.lse))

    # Keys of the next step travel while this step computes; the softmax merges by (output, lse), in any order.
    _, done = ring.run_ring(
        travelling_keys_of(local), {}, ring_step, _compat.as_varying(_attend_to_sinks(record), record)
    )
    output = ring.unstripe(done.output.astype(record.query.dtype), 1)
    return output, SoftmaxResiduals(lse=ring.unstripe(done.lse, 2))


def _attend_to_sinks(record: RingAttention) -> PartialAttention:
    """Returns attention to no key: the sinks alone, which are thereby counted once."""
    (b, t, h, _), dtype = record.query.shape, accumulator(as_tiled_attention(record))
    sinks = jnp.full(h, -jnp.inf, dtype) if record.softmax_aux is None else record.softmax_aux.astype(dtype)
    output = jnp.zeros((b, t, h, record.value.shape[3]), dtype)
    return PartialAttention(output, jnp.broadcast_to(sinks[:, None], (b, h, t)))
